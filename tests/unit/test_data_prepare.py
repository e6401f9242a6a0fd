"""From files to samples: what is made, cached and dealt, what is bad, what breaks its contract."""

from __future__ import annotations

import gc
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.data.index import BadRow
from raycloud.data.prepare import deal_shares, labels_of, make_block, make_index
from raycloud.data.provider import Provided
from raycloud.data.recipe import (
    by_version,
    compacted,
    data_set_of,
    plan_table,
    plan_work,
    recipe_of,
)
from raycloud.errors import DataError, TaskError
from raycloud.order.layout import lanes_of
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from tests.one_process import prepare_here
from tests.preparing import (
    FILES,
    ROWS,
    Bench,
    Doubled,
    bench_of,
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


class Picky(Doubled):
    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        if (rows["x"] == 12).any():
            raise ValueError("twelve")
        return {"x": rows["x"]}


def picky() -> Task:
    Picky.__abstractmethods__ = frozenset()
    return Picky()


def test_bad_rows_are_refused(bench: Bench, folder: Path) -> None:
    with pytest.raises(DataError, match=r"1 row .*2.parquet: row 2: .*twelve"):
        bench.prepare(folder, of=picky())
    assert not bench.cache.ls().sets[0].data_set.complete


def test_bad_rows_are_skipped_counted_and_remembered(
    bench: Bench, folder: Path, tmp_path: Path
) -> None:
    first = bench.prepare(folder, of=picky(), bad_rows="skip")
    assert x_of(first) == [i for i in range(ROWS) if i != 12]
    index = first.train.index
    assert index.bad_rows == 1
    (bad,) = index.bad
    assert (Path(bad.file), bad.row) == (folder / "2.parquet", 2)
    moved = folder.rename(tmp_path / "moved")
    again = bench.prepare(moved, of=picky(), bad_rows="skip").train.index
    assert bench.read == []
    assert again.bad == (BadRow(file=str(moved / "2.parquet"), row=2, why=bad.why),)
    dealt = bench.prepare(moved, of=picky(), bad_rows="skip", stratify="x").train.index
    assert (dealt.bad_rows, dealt.bad) == (1, again.bad)
    warm = bench.prepare(moved, of=picky(), bad_rows="skip", stratify="x").train.index
    assert warm == dealt


def test_a_table(bench: Bench) -> None:
    rows = pa.concat_tables([table(0, 5), table(5, 4)])
    provided = prepare_here(job(), task(), Splits(train=rows), *bench_of(bench))  # type: ignore[arg-type]
    assert x_of(provided) == [2 * i for i in range(9)]
    (given,) = provided.train.index.inputs
    assert (given.path, given.version) == ("Source.dataset", 0)
    other = bench.prepare(Source(dataset=table(0, 9)))  # chunked otherwise
    assert other.train.index == provided.train.index
    assert other.prepared["train"].made_blocks == 0
    assert bench.prepare(Source(dataset=table(1, 9))).prepared["train"].made_blocks == 1
    known = {"train": provided.train.index.inputs}
    assert bench.prepare(Source(dataset=rows), known=known).train.index == other.train.index
    with pytest.raises(DataError, match=r"Source.dataset has changed"):
        bench.prepare(Source(dataset=table(1, 9)), known=known)


def test_a_table_is_cut(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycloud.data.recipe._SLICE_BYTES", 50)
    source = Source(dataset=table(0, 9), columns=["label", "x"])
    recipe = recipe_of(task(), source, job())
    assert recipe.source.dataset is None
    _, works = plan_table(recipe, source.dataset)
    ranges = [(work.slice.start, work.slice.stop) for work in works]
    assert ranges == [(start, start + 3) for start in (0, 3, 6)]
    assert len({work.key for work in works}) == 3
    assert works[0].table is not None
    assert works[0].table.column_names == ["label", "x"]
    small = compacted(works[1].table)
    assert small.equals(works[1].table)
    assert len(pickle.dumps(small)) < 2000
    assert by_version(works) == [range(3)]
    assert x_of(bench.prepare(source)) == [2 * i for i in range(9)]
    with pytest.raises(DataError, match=r"Source.columns names 'z', .* does not have"):
        bench.prepare(Source(dataset=table(0, 9), columns=["z"]))


def test_a_key_stands_for_the_rows(bench: Bench) -> None:
    first = bench.prepare(Source(dataset=table(0, 9), key="mine"))
    again = bench.prepare(Source(dataset=table(1, 9), key="mine"))
    assert x_of(again) == x_of(first)
    assert bench.cache.ls().sets[0].data_set.source == "mine"
    assert x_of(bench.prepare(Source(dataset=table(1, 9), key="other"))) != x_of(first)


def test_hugging_face(bench: Bench) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict(table(0, 9).to_pydict())
    provided = bench.prepare(Source(dataset=whole))
    assert x_of(provided) == [2 * i for i in range(9)]
    chosen = bench.prepare(Source(dataset=whole.select([8, 0, 3])))
    assert x_of(chosen) == [16, 0, 6]
    again = bench.prepare(Source(dataset=datasets.Dataset.from_dict(table(0, 9).to_pydict())))
    assert again.train.index == provided.train.index


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (Source(), "neither a path nor a dataset"),
        (Source(path="/d", dataset=table(0, 1)), "both a path and a dataset"),
        (Source(dataset=[1, 2]), "Source.dataset is a list"),
        (Source(dataset=table(0, 0)), "no rows"),
    ],
)
def test_sources_that_say_nothing(bench: Bench, source: Source, why: str) -> None:
    with pytest.raises(DataError, match=why):
        bench.prepare(source)


class Odd(Doubled):
    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        return {"x": rows["x"].astype(np.int64 if 0 in rows["x"] else np.float64)}


class Empty(Doubled):
    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        return {"x": rows["x"][:0]}


class Packed(Doubled):
    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        x = rows["x"]
        return {"x": x[: len(x) // 2 * 2].reshape(-1, 2).sum(axis=1)}


def test_blocks_must_agree_in_their_columns(bench: Bench, folder: Path) -> None:
    Odd.__abstractmethods__ = frozenset()
    with pytest.raises(DataError, match=r"'x: double' in .*2.parquet .*0.parquet has 'x: int64'"):
        bench.prepare(folder, of=Odd())


def test_no_rows_are_left(bench: Bench, folder: Path) -> None:
    Empty.__abstractmethods__ = frozenset()
    for stratify in (None, "x"):
        with pytest.raises(DataError, match="the data set has no rows: 3 pieces were read"):
            bench.prepare(folder, of=Empty(), stratify=stratify)


def test_rows_may_become_others(bench: Bench, folder: Path) -> None:
    Packed.__abstractmethods__ = frozenset()
    provided = bench.prepare(folder, of=Packed())
    assert len(provided.train) == ROWS // 2
    assert sum(x_of(provided)) == sum(range(ROWS))


def test_a_task_that_breaks_its_contract(bench: Bench, folder: Path) -> None:
    class Broken(Doubled):
        def preprocess(self, rows: Rows) -> Any:
            return 3

    Broken.__abstractmethods__ = frozenset()
    with pytest.raises(TaskError):
        bench.prepare(folder, of=Broken())


def test_a_file_that_changes_while_it_is_prepared(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "0.parquet"
    pq.write_table(table(0, FILES[0]), path, compression="none")
    one, recipe = task(), recipe_of(task(), Source(path=str(folder)), job())
    _, works = plan_work(recipe, bench.cache, bench.clock)
    content = path.read_bytes()
    with monkeypatch.context() as patch:  # where nothing has changed nothing is read for it
        patch.setattr("raycloud.data.digest._content", None)
        make_block(recipe, works[1], one, bench.cache, bench.clock, "here")
    pq.write_table(table(99, FILES[0]), path, compression="none")
    assert path.stat().st_size == len(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"0.parquet' has changed while it was read"):
        make_block(recipe, works[0], one, bench.cache, bench.clock, "here")
    assert not bench.cache.has(works[0].key)
    path.write_bytes(content)  # at another time
    made = make_block(recipe, works[0], one, bench.cache, bench.clock, "here")
    assert made.block.key == works[0].key


def mix(provided: Provided) -> list[Counter[str]]:
    """The classes in each partition."""
    samples = provided.train
    return [
        Counter(samples.gather(np.arange(first, last))["label"])
        for first, last in pairwise(samples.index.partitions)
    ]


def test_every_partition_has_the_mix(bench: Bench, folder: Path) -> None:
    provided = bench.prepare(folder, stratify="label")
    index = provided.train.index
    assert len(index.partitions) == 9
    assert [block.rows for block in index.blocks] == [b - a for a, b in pairwise(index.partitions)]
    for classes in mix(provided):
        assert all(1 <= count <= 2 for count in classes.values())
        assert len(classes) == 3
        assert 3 <= classes.total() <= 4
    assert sorted(x_of(provided)) == [2 * i for i in range(ROWS)]
    for first, last in pairwise(index.partitions):  # in the order of the source
        rows = provided.train.gather(np.arange(first, last))["x"].tolist()
        assert rows == sorted(rows)


def test_stratified_blocks_need_nothing_else(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.prepare(folder, stratify="label")
    (held,) = bench.cache.ls().sets
    assert held.data_set.keys == tuple(block.key for block in first.train.index.blocks)
    for key in held.data_set.parts:
        bench.cache.path_of(key).unlink()
    second = bench.prepare(folder, stratify="label")
    assert bench.read == []
    assert second.train.index == first.train.index
    assert second.prepared["train"].cached_blocks == len(first.train.index.blocks)
    # Others are dealt for other lanes, and of the same files.
    other = Job(task="a.py:A", steps=1, global_batch=12, micro_batch=4, data={"stratify": "label"})
    third = prepare_here(other, task(), Splits(train=Source(path=str(folder))), *bench_of(bench))
    assert len(third.train.index.partitions) == 13
    assert sorted(x_of(third)) == sorted(x_of(first))


def test_stratified_growth_keeps_what_was_dealt(bench: Bench, folder: Path) -> None:
    first = bench.prepare(folder, stratify="label")
    pq.write_table(table(100, 9), folder / "0-new.parquet")
    second = bench.prepare(folder, known={"train": first.train.index.inputs}, stratify="label")
    assert bench.read == ["0-new.parquet"]
    before, after = first.train.index, second.train.index
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert after.partitions[: len(before.partitions)] == before.partitions
    assert (len(after.partitions) - 1) % 2 == 0
    assert sorted(x_of(second)[ROWS:]) == list(range(200, 218, 2))
    assert len(bench.cache.ls().sets) == 2


def test_stratified_with_few_rows(bench: Bench) -> None:
    rows = pa.table({"x": [1], "label": ["rare"]})
    provided = bench.prepare(Source(dataset=rows), stratify="label")
    assert provided.train.index.partitions == (0, 1, 1)
    assert x_of(provided) == [2]
    again = bench.prepare(Source(dataset=rows), stratify="label")
    assert again.train.index == provided.train.index


@pytest.mark.parametrize(
    ("column", "why"),
    [("nope", "preprocessed rows have no such column"), ("image", "not single values")],
)
def test_what_cannot_be_dealt_by(bench: Bench, column: str, why: str) -> None:
    class Images(Task):
        model = data = loss = optimizer = None  # type: ignore[assignment]

        def preprocess(self, rows: Rows) -> Mapping[str, Any]:
            return {"image": np.zeros((len(rows), 2, 2))}

    Images.__abstractmethods__ = frozenset()
    with pytest.raises(DataError, match=rf"data.stratify = '{column}': .*{why}"):
        bench.prepare(Source(dataset=table(0, 4)), of=Images(), stratify=column)  # type: ignore[abstract]


def test_labels_of_several_blocks_are_one_set_of_classes(bench: Bench, folder: Path) -> None:
    """A class is the same in every block, wherever it first appears there."""
    recipe = recipe_of(task(), Source(path=str(folder)), job(stratify="label"))
    _, works = plan_work(recipe, *bench_of(bench))
    made = [make_block(recipe, w, task(), *bench_of(bench), "n") for w in works]
    labels = [labels_of(bench.cache.open(w.key), "label") for w in works]
    shares = deal_shares(recipe, works, made, labels, lanes=2)
    assert len({share.key for share in shares}) == len(shares)
    assert sum(share.size for share in shares) == ROWS
    other = deal_shares(recipe, works, made, labels, lanes=3)
    assert {s.key for s in shares}.isdisjoint({s.key for s in other})
    assert data_set_of(recipe, works, 2).id != data_set_of(recipe, works, 3).id
    for share in shares:
        assert share.size == sum(len(rows) for rows in share.rows.values())


def test_what_is_added_to_a_stratified_data_set_has_its_columns(bench: Bench) -> None:
    folder = bench.cache.root.parent / "csv"
    folder.mkdir()
    (folder / "a.csv").write_text("x,label\n" + "1,cat\n2,dog\n" * 8)
    first = bench.prepare(folder, stratify="label")
    (folder / "b.csv").write_text("x,label\n" + "1.5,cat\n2.5,dog\n" * 8)
    known = {"train": first.train.index.inputs}
    for _ in range(2):  # the second time from the records
        with pytest.raises(DataError, match=r"'x: double' in .*b.csv, where .*a.csv has 'x: int"):
            bench.prepare(folder, known=known, stratify="label")


def test_a_share_is_known_by_how_many_there_are(
    bench: Bench, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.prepare(folder, stratify="label").train.index
    monkeypatch.setattr("raycloud.data.prepare.partition_count", lambda *_: 4)
    other = Bench(tmp_path / "other", monkeypatch)
    second = other.prepare(folder, stratify="label").train.index
    assert len(first.blocks) != len(second.blocks) == 4
    assert not {one.key for one in first.blocks} & {one.key for one in second.blocks}
