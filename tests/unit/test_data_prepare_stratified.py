"""Stratified data sets: the mix of each partition, and what is made only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.data.prepare import deal_shares, labels_of, make_block
from raycloud.data.provider import Provided
from raycloud.data.recipe import data_set_of, plan_work, recipe_of
from raycloud.errors import DataError
from raycloud.rows import Rows
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from tests.one_process import prepare_here
from tests.preparing import (
    ROWS,
    Bench,
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
