"""Rows that are bad or in hand, and sources and tasks that break their contract."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.data.index import BadRow
from raycloud.data.prepare import make_block
from raycloud.data.recipe import by_version, compacted, plan_table, plan_work, recipe_of
from raycloud.errors import DataError, TaskError
from raycloud.rows import Rows
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
