"""Samples by id: the rows of blocks, whatever their columns, from any thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycloud.data import samples as samples_module
from raycloud.data.block import open_block, write_block
from raycloud.data.index import Block, Index
from raycloud.data.samples import BlockSamples
from raycloud.errors import DataError, InternalError
from raycloud.rows import Rows

SIZES = (5, 1, 7, 4)


def table(first: int, rows: int) -> pa.Table:
    """Columns of all kinds; what is missing is missing in some blocks only."""
    n = np.arange(first, first + rows)
    made = Rows(
        {
            "image": (n[:, None, None, None] * np.ones((4, 3, 2))).astype(np.uint8),
            "matrix": n[:, None].astype(np.float32) * np.ones(3, dtype=np.float32),
            "label": n,
            "name": [f"n{i}" for i in n],
        }
    ).to_table()
    return made.append_column("flag", pa.array((n % 2 == 0).tolist())).append_column(
        "list", pa.array([list(range(i % 4)) for i in n])
    )


class Blocks:
    """Blocks of `SIZES`, which count how often they are opened."""

    def __init__(self, root: Path, tables: list[pa.Table]) -> None:
        self.tables = tables
        self.opened: list[str] = []
        self.root = root
        blocks = []
        for number, part in enumerate(tables):
            rows, size = write_block(root / f"{number}.arrow", [part])
            blocks.append(Block(key=str(number), rows=rows, bytes=size))
        self.index = Index(blocks=tuple(blocks), partitions=(0, sum(map(len, tables))))

    def table_of(self, block: Block) -> pa.Table:
        self.opened.append(block.key)
        return open_block(self.root / f"{block.key}.arrow")

    def samples(self) -> BlockSamples:
        return BlockSamples(self.index, self.table_of)

    def expected(self, ids: np.ndarray) -> Rows:
        """What `gather` promises."""
        return Rows.from_table(pa.concat_tables(self.tables).take(pa.array(ids)).combine_chunks())


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    starts = np.cumsum((0, *SIZES))
    return Blocks(tmp_path, [table(int(start), n) for start, n in zip(starts, SIZES, strict=False)])


def assert_same(rows: Rows, expected: Rows) -> None:
    assert rows.columns == expected.columns
    assert len(rows) == len(expected)
    for name in rows.columns:
        left, right = rows[name], expected[name]
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        if left.dtype == object:
            assert list(map(str, left)) == list(map(str, right))
        else:
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "ids",
    [
        [3],
        [0, 1, 2, 3],
        [16, 0, 5, 12, 6, 1],
        [5, 5, 5, 0, 5],
        list(range(17)),
        list(range(16, -1, -1)),
        [],
    ],
)
def test_gather(blocks: Blocks, ids: list[int]) -> None:
    numbers = np.array(ids, dtype=np.int64)
    assert_same(blocks.samples().gather(numbers), blocks.expected(numbers))


def test_gather_takes_what_numpy_makes_of_ids(blocks: Blocks) -> None:
    rows = blocks.samples().gather([1, 2])  # type: ignore[arg-type]
    assert rows["label"].tolist() == [1, 2]
    assert blocks.samples().gather(np.array([9], dtype=np.uint64))["label"].tolist() == [9]


def test_a_row(blocks: Blocks) -> None:
    samples = blocks.samples()
    assert len(samples) == 17
    row = samples[11]
    assert (row["label"], row["name"], row["flag"], list(row["list"])) == (
        11,
        "n11",
        False,
        [0, 1, 2],
    )
    assert row["image"].shape == (4, 3, 2)
    assert [sample["label"] for sample in samples] == list(range(17))


@pytest.mark.parametrize("ids", [[17], [0, -1], [2, 99, 3]])
def test_ids_that_no_row_has(blocks: Blocks, ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"sample (17|-1|99) of 17"):
        blocks.samples().gather(np.array(ids))
    with pytest.raises(IndexError):
        blocks.samples()[17]


def test_missing_values_do_not_depend_on_the_blocks(tmp_path: Path) -> None:
    """What a column becomes follows from the rows that are gathered, not from their neighbours."""
    parts = [
        pa.table({"f": [1.0, 2.0], "i": [1, 2], "s": ["a", "b"]}),
        pa.table(
            {
                "f": pa.array([None, 4.0], pa.float64()),
                "i": pa.array([3, None], pa.int64()),
                "s": pa.array([None, "d"], pa.string()),
            }
        ),
    ]
    blocks = Blocks(tmp_path, parts)
    samples = blocks.samples()
    for ids in ([0, 1], [0, 3], [0, 2], [2, 1, 0], [3, 3]):
        numbers = np.array(ids)
        assert_same(samples.gather(numbers), blocks.expected(numbers))
    assert samples.gather(np.array([0, 2]))["i"].dtype == np.int64
    assert np.isnan(samples.gather(np.array([0, 2]))["f"][1])


def test_results_are_the_callers_own(blocks: Blocks) -> None:
    samples = blocks.samples()
    first = samples.gather(np.array([1, 2]))
    first["image"][:] = 0
    first["label"][:] = 0
    assert samples.gather(np.array([1, 2]))["label"].tolist() == [1, 2]
    assert samples.gather(np.array([1, 2]))["image"].max() == 2


def test_blocks_are_opened_when_needed_and_kept(blocks: Blocks) -> None:
    samples = blocks.samples()
    assert blocks.opened == []
    samples.gather(np.array([6, 7]))
    samples.gather(np.array([8, 0]))
    assert blocks.opened == ["2", "0"]


def test_only_so_many_stay_open(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_OPEN_BLOCKS", 2)
    samples = blocks.samples()
    for ids in ([0], [5], [0], [6], [0], [5], [13]):
        samples.gather(np.array(ids))
    assert blocks.opened == ["0", "1", "2", "0", "1", "3"]
    numbers = np.arange(17)
    assert_same(samples.gather(numbers), blocks.expected(numbers))


def test_a_block_that_cannot_be_had_is_asked_for_again(blocks: Blocks) -> None:
    errors = [DataError("gone"), None]

    def table_of(block: Block) -> pa.Table:
        error = errors.pop(0)
        if error is not None:
            raise error
        return blocks.table_of(block)

    samples = BlockSamples(blocks.index, table_of)
    with pytest.raises(DataError, match="gone"):
        samples.gather(np.array([0]))
    assert samples.gather(np.array([0]))["label"].tolist() == [0]


def test_a_block_of_other_rows(blocks: Blocks) -> None:
    samples = BlockSamples(blocks.index, lambda _: blocks.tables[1])
    with pytest.raises(InternalError, match="has 1 rows where the index of the data set says 5"):
        samples.gather(np.array([0]))


def test_threads_gather_alike(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_OPEN_BLOCKS", 2)
    samples = blocks.samples()
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 17, 8) for _ in range(200)]
    with ThreadPoolExecutor(4) as threads:
        for ids, rows in zip(asked, threads.map(samples.gather, asked), strict=True):
            assert rows["label"].tolist() == ids.tolist()
            assert rows["image"][:, 0, 0, 0].tolist() == ids.tolist()


def test_a_block_is_opened_once_by_many(blocks: Blocks) -> None:
    entered, go = threading.Event(), threading.Event()

    def table_of(block: Block) -> pa.Table:
        entered.set()
        assert go.wait(30)
        return blocks.table_of(block)

    samples = BlockSamples(blocks.index, table_of)
    with ThreadPoolExecutor(3) as threads:
        rows = [threads.submit(samples.gather, np.array([i])) for i in range(3)]
        assert entered.wait(30)
        go.set()
        assert [r.result()["label"].tolist() for r in rows] == [[0], [1], [2]]
    assert blocks.opened == ["0"]


def test_want_opens_ahead(blocks: Blocks) -> None:
    opened = threading.Semaphore(0)

    def table_of(block: Block) -> pa.Table:
        try:
            return blocks.table_of(block)
        finally:
            opened.release()

    samples = BlockSamples(blocks.index, table_of)
    samples.prefetch(np.array([16, 0, 1]))
    samples.prefetch(np.array([0, 16]))
    assert opened.acquire(timeout=30)
    assert opened.acquire(timeout=30)
    assert samples.gather(np.array([0, 16]))["label"].tolist() == [0, 16]
    assert sorted(blocks.opened) == ["0", "3"]


def test_what_fails_ahead_is_told_when_it_is_needed(blocks: Blocks) -> None:
    tried = threading.Semaphore(0)

    def table_of(_block: Block) -> Any:
        tried.release()
        raise DataError("gone")

    samples = BlockSamples(blocks.index, table_of)
    samples.prefetch(np.array([0]))
    assert tried.acquire(timeout=30)
    with pytest.raises(DataError, match="gone"):
        samples.gather(np.array([0]))


class Elsewhere:
    """Blocks of another node: single rows come at once, whole blocks once they `may_come`.

    That is after `rows` rows were asked for; None: whoever tests says so.
    """

    def __init__(self, blocks: Blocks, rows: int | None = None) -> None:
        self.blocks, self._rows = blocks, rows
        self.may_come = threading.Event()
        self.asked: list[tuple[str, int]] = []

    def table_of(self, block: Block) -> pa.Table:
        assert self.may_come.wait(30)
        return self.blocks.table_of(block)

    def rows_of(self, wanted: samples_module.Wanted) -> dict[str, pa.Table]:
        self.asked += [(block.key, n) for block, numbers in wanted for n in numbers.tolist()]
        if self._rows is not None and len(self.asked) >= self._rows:
            self.may_come.set()
        tables = self.blocks.tables
        return {b.key: tables[int(b.key)].take(pa.array(numbers)) for b, numbers in wanted}

    def samples(self) -> BlockSamples:
        return BlockSamples(self.blocks.index, self.table_of, self.rows_of)


def all_read(samples: BlockSamples) -> None:
    """Wait until what was being read ahead is here, or has failed."""
    assert samples._ahead is not None
    samples._ahead.submit(int).result(30)


def test_single_rows_of_blocks_elsewhere_until_they_are_here(blocks: Blocks) -> None:
    """A step need not wait for all of a block of which it reads a row."""
    elsewhere = Elsewhere(blocks)
    samples, ids = elsewhere.samples(), np.array([15, 3, 0, 15])
    try:
        rows = samples.gather(ids)
        assert not blocks.opened
        assert [key for key, _ in elsewhere.asked] == ["0", "0", "3", "3"]
    finally:
        elsewhere.may_come.set()
    all_read(samples)
    there = samples.gather(ids)
    assert (blocks.opened, len(elsewhere.asked)) == (["0", "3"], 4)
    for name in ("label", "image", "name"):
        assert np.array_equal(rows[name], there[name])


def test_rows_that_a_step_waits_for_come_before_blocks(blocks: Blocks) -> None:
    """On a thin link a block takes as long as the rows of many steps."""
    reading, answered = threading.Event(), threading.Event()

    def table_of(block: Block) -> pa.Table:
        reading.set()
        return blocks.table_of(block)

    def rows_of(wanted: samples_module.Wanted) -> dict[str, pa.Table]:
        assert not reading.wait(0.3)
        answered.set()
        return {b.key: blocks.tables[int(b.key)].take(pa.array(n)) for b, n in wanted}

    samples = BlockSamples(blocks.index, table_of, rows_of)
    assert samples.gather(np.array([15, 3]))["label"].tolist() == [15, 3]
    assert answered.is_set()
    all_read(samples)
    assert blocks.opened == ["0", "3"]


def test_who_is_idle_copies_blocks_in_the_order_of_their_partitions(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "_COPIERS", 1)
    elsewhere, over = Elsewhere(blocks), threading.Event()
    elsewhere.may_come.set()
    rows = [0, *(np.cumsum([block.rows for block in blocks.index.blocks])).tolist()]
    cut = (0, rows[1] + 1, rows[2], rows[2], rows[4])  # the first reaches into a second block
    index = replace(blocks.index, partitions=cut)
    samples = BlockSamples(index, elsewhere.table_of, elsewhere.rows_of)

    def idle() -> bool | None:
        if enough := len(samples.opened) == 3:
            over.set()
        return not enough or None

    samples.copy_while(idle, np.array([3, 0, 2, 1]))
    assert over.wait(30)
    assert blocks.opened == ["2", "3", "0"]
    assert samples.opened == {0, 2, 3}
    assert not elsewhere.asked


def test_copied_gently_one_comes_after_the_other_while_it_may(blocks: Blocks) -> None:
    """What is open by then is not asked for again."""
    at_once, most, asked, over = [0], [0], [0], threading.Event()

    def table_of(block: Block) -> pa.Table:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return blocks.table_of(block)
        finally:
            at_once[0] -= 1

    index = replace(blocks.index, partitions=(0, *np.cumsum(SIZES).tolist()))
    samples = BlockSamples(index, table_of, lambda _: {})
    samples.gather(np.array([5]))  # the second block

    def idle() -> bool | None:
        asked[0] += 1
        if len(samples.opened) == len(SIZES):
            over.set()
            return None
        return asked[0] > 1  # not at first

    samples.copy_while(idle, np.array([1, 0, 2, 3]), gently=True)
    assert over.wait(30)
    assert blocks.opened == ["1", "0", "2", "3"]
    assert most == [1]


def test_nothing_is_copied_that_is_here_or_large(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> bool:
        raise AssertionError("it has begun to copy")

    before = threading.enumerate()
    blocks.samples().copy_while(never, np.array([0]))
    monkeypatch.setattr(samples_module, "_SMALL_BYTES", blocks.index.bytes - 1)
    Elsewhere(blocks).samples().copy_while(never, np.array([0]))
    assert not set(threading.enumerate()) - set(before)


def test_no_more_rows_are_asked_for_alone_than_a_block_has(blocks: Blocks) -> None:
    elsewhere = Elsewhere(blocks, rows=5)
    samples = elsewhere.samples()
    for row in (0, 1, 2, 3, 4, 0):  # of five
        assert samples.gather(np.array([row]))["label"].tolist() == [row]
    assert elsewhere.asked == [("0", row) for row in range(5)]


def test_of_a_few_rows_that_nobody_has_announced_the_block_does_not_come(tmp_path: Path) -> None:
    """A short last step reads a little of what others read all of."""
    elsewhere = Elsewhere(Blocks(tmp_path, [table(0, 64)]), rows=8)
    samples = elsewhere.samples()
    for row in range(7):
        assert samples.gather(np.array([row]))["label"].tolist() == [row]
    assert samples._ahead is None
    assert samples.gather(np.array([7]))["label"].tolist() == [7]
    all_read(samples)
    assert elsewhere.blocks.opened == ["0"]
    assert elsewhere.asked == [("0", row) for row in range(8)]


def test_blocks_of_equal_content_have_rows_of_their_own(blocks: Blocks) -> None:
    """They have one key, and rows are asked for by it."""
    first, elsewhere = blocks.index.blocks[0], Elsewhere(blocks, rows=1)
    index = Index(blocks=(first, first), partitions=(0, 2 * first.rows))
    samples = BlockSamples(index, elsewhere.table_of, elsewhere.rows_of)
    assert samples.gather(np.array([1, first.rows + 3]))["label"].tolist() == [1, 3]


def test_rows_elsewhere_that_nobody_gives(blocks: Blocks) -> None:
    samples = BlockSamples(blocks.index, blocks.table_of, lambda _: {})
    assert samples.gather(np.array([16, 3]))["label"].tolist() == [16, 3]


def test_reading_a_block_elsewhere_that_fails_is_told(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Block) -> Any:
        raise DataError("gone")

    monkeypatch.setattr(blocks, "table_of", gone)
    samples = Elsewhere(blocks, rows=1).samples()
    assert samples.gather(np.array([0]))["label"].tolist() == [0]
    all_read(samples)
    with pytest.raises(DataError, match="gone"):
        samples.gather(np.array([0]))
