"""From files to samples, in this process: what is made, what is cached, what keeps its place."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.data.prepare import make_block, make_index
from raycloud.data.recipe import plan_work, recipe_of
from raycloud.errors import DataError
from raycloud.order.layout import lanes_of
from raycloud.task import Source, Splits
from tests.one_process import prepare_here
from tests.preparing import (
    ROWS,
    Bench,
    five_files,
    job,
    table,
    task,
    x_of,
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return five_files(tmp_path / "d")


def test_rows_in_the_order_of_files(bench: Bench, folder: Path) -> None:
    provided = bench.prepare(folder)
    assert x_of(provided) == [2 * i for i in range(ROWS)]
    index, prepared = provided.train.index, provided.prepared["train"]
    assert prepared.index is index
    assert len(index.blocks) > 1
    assert [Path(one.path).name for one in index.inputs] == [f"{i}.parquet" for i in range(5)]
    assert (prepared.cached_blocks, prepared.made_blocks) == (0, len(index.blocks))
    assert index.partitions == (0, 3, 7, 11, 15, 18, 22, 26, 30)  # four for each of two lanes
    assert prepared.read_s == prepared.seconds == len(index.blocks)
    assert provided.held_out is None
    assert index.rows == ROWS
    assert index.bytes == sum(bench.cache.path_of(b.key).stat().st_size for b in index.blocks)


def test_held_out(bench: Bench, folder: Path) -> None:
    splits = Splits(
        train=Source(path=str(folder / "[0-3].parquet")),
        held_out=Source(path=str(folder / "4.parquet")),
    )
    provided = prepare_here(job(stratify="label"), task(), splits, bench.cache, bench.clock)
    assert provided.held_out is not None
    assert [row["x"] for row in provided.held_out] == [2 * i for i in range(24, 30)]
    assert set(provided.prepared) == {"train", "held_out"}
    held = {(h.data_set.split, h.data_set.task) for h in bench.cache.ls().sets}
    assert held == {("train", "Doubled"), ("held_out", "Doubled")}


def test_the_second_time_nothing_is_read(bench: Bench, folder: Path) -> None:
    first = bench.prepare(folder)
    second = bench.prepare(folder)
    assert bench.read == []
    assert second.train.index == first.train.index
    prepared = second.prepared["train"]
    assert (prepared.made_blocks, prepared.read_s) == (0, 0.0)
    assert prepared.cached_blocks == len(first.train.index.blocks)
    assert x_of(second) == x_of(first)


def test_what_a_block_follows_from(bench: Bench, folder: Path, tmp_path: Path) -> None:
    first = bench.prepare(folder)
    moved = folder.rename(tmp_path / "moved")
    assert bench.prepare(moved).train.index.blocks == first.train.index.blocks
    for same in ({"window": 9}, {"partition_bytes": 4096}, {"partition_by": "bytes"}):
        bench.prepare(moved, **same)
        assert bench.read == [], same
    bench.prepare(moved, of=task(width=5))
    assert bench.read == []
    for other in (
        {"of": task(factor=3)},
        {"bad_rows": "skip"},
        {"train": Source(path=str(moved), types={"x": "int32"})},
        {"train": Source(path=str(moved), columns=["x", "label"])},
        {"train": Source(path=str(moved), required=["label"])},
    ):
        bench.prepare(**{"train": moved, **other})
        assert len(bench.read) == 5, other


def test_a_new_file_costs_its_own_slices(bench: Bench, folder: Path) -> None:
    first = bench.prepare(folder)
    pq.write_table(table(100, 5), folder / "0-new.parquet")  # sorts before most
    known = {"train": first.train.index.inputs}
    second = bench.prepare(folder, known=known)
    assert bench.read == ["0-new.parquet"]
    before, after = first.train.index, second.train.index
    assert after.inputs[:5] == before.inputs
    assert (Path(after.inputs[5].path).name, after.inputs[5].version) == ("0-new.parquet", 1)
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert after.partitions[: len(before.partitions)] == before.partitions
    assert after.partitions[len(before.partitions) :] == (31, 32, 33, 35)  # two of each lane
    assert x_of(second) == [*x_of(first), *range(200, 210, 2)]
    # A third version keeps the second as it is; and nothing new leaves all as it is.
    pq.write_table(table(200, 3), folder / "0-newer.parquet")
    third = bench.prepare(folder, known={"train": after.inputs})
    assert bench.read == ["0-newer.parquet"]
    assert [one.version for one in third.train.index.inputs] == [0, 0, 0, 0, 0, 1, 2]
    assert third.train.index.partitions[: len(after.partitions)] == after.partitions
    fourth = bench.prepare(folder, known={"train": third.train.index.inputs})
    assert fourth.train.index == third.train.index
    # A new run goes by the paths of all.
    assert x_of(bench.prepare(folder))[:9] == [200, 202, 204, 206, 208, 400, 402, 404, 0]


def test_known_inputs_must_stay(bench: Bench, folder: Path) -> None:
    known = {"train": bench.prepare(folder).train.index.inputs}
    content = (folder / "2.parquet").read_bytes()
    (folder / "2.parquet").unlink()
    with pytest.raises(DataError, match=r"2.parquet is gone since this run read it"):
        bench.prepare(folder, known=known)
    pq.write_table(table(7, 10), folder / "2.parquet")
    with pytest.raises(DataError, match=r"2.parquet has changed") as caught:
        bench.prepare(folder, known=known)
    assert "--resume" in caught.value.hint
    (folder / "2.parquet").write_bytes(content)
    assert bench.prepare(folder, known=known).train.index.inputs == known["train"]


def test_the_index_does_not_depend_on_who_makes_what(bench: Bench, folder: Path) -> None:
    recipe = pickle.loads(pickle.dumps(recipe_of(task(), Source(path=str(folder)), job())))
    inputs, works = plan_work(recipe, bench.cache, bench.clock)
    works = pickle.loads(pickle.dumps(works))
    makings = [
        make_block(recipe, work, task(), bench.cache, bench.clock, f"node {number}")
        for number, work in reversed(list(enumerate(works)))
    ]
    made = pickle.loads(pickle.dumps(list(reversed(makings))))
    index = make_index(recipe, inputs, works, made, lanes_of(8, 4))
    here = bench.prepare(folder).train.index
    assert [replace(b, nodes=()) for b in index.blocks] == [
        replace(b, nodes=()) for b in here.blocks
    ]
    assert index.blocks[0].nodes == ("node 0",)
    assert index.partitions == here.partitions
    again = make_block(recipe, works[0], task(), bench.cache, bench.clock, "node 0")
    assert replace(again, cached=False, read_s=1.0) == made[0]
    assert again.cached


def test_partitions_equal_in_bytes(bench: Bench, tmp_path: Path) -> None:
    texts = pa.table({"x": range(64), "label": ["a" * (1 if i < 32 else 100) for i in range(64)]})
    provided = bench.prepare(Source(dataset=texts), partition_by="bytes")
    index = provided.train.index
    widths = [8 + (1 if i < 32 else 100) for i in range(64)]
    sizes = [sum(widths[first:last]) for first, last in pairwise(index.partitions)]
    assert len(sizes) == 8
    assert max(sizes) - min(sizes) <= 2 * 108
    assert bench.prepare(Source(dataset=texts)).train.index.partitions != index.partitions


def test_small_partitions(bench: Bench, folder: Path) -> None:
    index = bench.prepare(folder, partition_bytes=1024).train.index
    assert index.bytes / 1024 <= len(index.partitions) - 1 <= 30
    assert (len(index.partitions) - 1) % 2 == 0


@pytest.mark.parametrize("stratify", [None, "label"])
@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_damaged_blocks_are_made_again(
    bench: Bench, folder: Path, stratify: str | None, harm: str
) -> None:
    expected = x_of(bench.prepare(folder, stratify=stratify))
    provided = bench.prepare(folder, stratify=stratify)
    for path in bench.cache.root.glob("blocks/*/*.arrow"):
        if harm == "remove":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-30])
    assert x_of(provided) == expected
    first = bench.prepare(folder, stratify=stratify)
    assert bench.read == []
    bench.cache.path_of(first.train.index.blocks[1].key).write_bytes(b"")
    assert x_of(bench.prepare(folder, stratify=stratify)) == expected
    assert len(bench.read) < 5 or stratify is not None


def test_the_data_set_is_in_use_while_its_samples_live(bench: Bench, folder: Path) -> None:
    provided = bench.prepare(folder)
    bench.cache.disk_bytes = 0
    assert bench.cache.evict() == 0
    (held,) = bench.cache.ls().sets
    assert [user.partition(" (")[0] for user in held.users] == ["run run"]
    del provided
    gc.collect()
    assert bench.cache.ls().sets[0].users == ()
    assert bench.cache.evict() > 0


def test_what_is_prepared_may_evict_what_is_old(bench: Bench, folder: Path) -> None:
    first = bench.prepare(folder)
    old = [block.key for block in first.train.index.blocks]
    del first
    gc.collect()
    bench.clock.advance(10.0)
    bench.cache.disk_bytes = 1
    second = bench.prepare(folder, of=task(factor=5))
    assert not any(bench.cache.has(key) for key in old)
    assert x_of(second) == [5 * i for i in range(ROWS)]
