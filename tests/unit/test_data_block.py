"""Blocks: written whole, mapped without a copy, and refused where they are damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raycloud.data import block
from raycloud.data.block import DamagedBlock, facts_of, open_block, publish, write_block
from raycloud.rows import Rows

GOLDEN = Path(__file__).parent / "golden" / "block.arrow"


def rows(first: int = 0, count: int = 5) -> pa.Table:
    numbers = np.arange(first, first + count)
    return Rows(
        {
            "image": (numbers[:, None, None] * np.ones((2, 3), dtype=np.int64)).astype(np.uint8),
            "label": numbers,
            "name": [f"n{number}" for number in numbers],
        }
    ).to_table()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "aa" / "a.arrow"
    written, size = write_block(path, [rows(0), rows(5, 3)], {"bad_rows": 2})
    table = open_block(path)
    assert (written, size) == (8, path.stat().st_size)
    assert table.to_pylist() == pa.concat_tables([rows(0), rows(5, 3)]).to_pylist()
    assert facts_of(table) == {"bad_rows": 2}
    assert Rows.from_table(table)["image"].shape == (8, 2, 3)
    assert [chunk.num_chunks for chunk in table.columns] == [1, 1, 1]


def test_nothing_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_block(path, [pa.table({"x": np.arange(100_000)})])
    files, bytes_before = open_files(), pa.total_allocated_bytes()
    tables = [open_block(path) for _ in range(10)]
    views = [table["x"].chunk(0).to_numpy(zero_copy_only=True) for table in tables]
    assert pa.total_allocated_bytes() == bytes_before
    assert open_files() == files
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [line[0].split("-") for line in maps if line[-1] == str(path)]
    address = views[0].ctypes.data
    assert any(int(first, 16) <= address < int(last, 16) for first, last in ours)
    path.unlink()
    assert views[9][-1] == 99_999


def test_no_rows_and_no_columns(tmp_path: Path) -> None:
    assert write_block(tmp_path / "a.arrow", [])[0] == 0
    assert open_block(tmp_path / "a.arrow").num_columns == 0
    write_block(tmp_path / "b.arrow", [rows(0, 0)])
    assert open_block(tmp_path / "b.arrow").column_names == ["image", "label", "name"]


def test_metadata_of_others_is_left_out(tmp_path: Path) -> None:
    table = rows().replace_schema_metadata({"pandas": "{}"})
    write_block(tmp_path / "a.arrow", [table, rows()])
    assert list(open_block(tmp_path / "a.arrow").schema.metadata) == [b"raycloud"]


def test_dictionaries_are_made_one(tmp_path: Path) -> None:
    parts = [pa.table({"x": pa.array(x).dictionary_encode()}) for x in (["a", "b"], ["b", "c"])]
    write_block(tmp_path / "a.arrow", parts)
    assert open_block(tmp_path / "a.arrow")["x"].to_pylist() == ["a", "b", "b", "c"]


def test_columns_that_differ(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_block(tmp_path / "a.arrow", [rows(), pa.table({"x": [1]})])
    assert list(tmp_path.iterdir()) == []


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_block(path, [rows()])
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedBlock, match="damaged"):
            open_block(path)


def test_what_is_no_block(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pytest.raises(DamagedBlock, match="is missing"):
        open_block(path)
    for meta, why in (
        (None, "is no block of raycloud"),
        ({b"raycloud": b'{"format": 2}'}, "has format 2, not 1"),
        ({b"raycloud": b'{"format": 1, "rows": 9, "facts": {}}'}, "has 1 rows, not 9"),
        ({b"raycloud": b"{"}, "Expecting property name"),
    ):
        table = pa.table({"x": [1]}).replace_schema_metadata(meta)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DamagedBlock, match=why):
            open_block(path)


def test_several_batches_are_read(tmp_path: Path) -> None:
    path, meta = tmp_path / "a.arrow", {"format": 1, "rows": 10, "facts": {}}
    table = rows(0, 10).replace_schema_metadata({"raycloud": json.dumps(meta)})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    assert open_block(path).to_pylist() == rows(0, 10).to_pylist()


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "a.arrow"
    write_block(path, [rows()])

    def fail(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = os if at == "fsync" else type(path)
    monkeypatch.setattr(owner, at, fail)
    with pytest.raises(OSError, match="No space"):
        write_block(path, [rows(5)])
    assert open_block(path).to_pylist() == rows().to_pylist()
    assert [file.name for file in tmp_path.iterdir()] == ["a.arrow"]


def test_what_makes_rows_may_fail(tmp_path: Path) -> None:
    def failing() -> Iterator[pa.Table]:
        yield rows()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_block(tmp_path / "a.arrow", failing())
    with pytest.raises(ZeroDivisionError):
        publish(tmp_path / "b", lambda file: file.write(bytes(1 // 0)))
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_is_cleaned_up_before_it_is_locked_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, drafts = fcntl.flock, []

    def slow_lock(file: int, how: int) -> None:
        drafts.append(next(tmp_path.glob("*.draft")))
        if len(drafts) == 1:
            drafts[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow_lock)
    write_block(tmp_path / "a.arrow", [rows()])
    assert len(set(drafts)) == 2
    assert open_block(tmp_path / "a.arrow").num_rows == 5
    assert [file.name for file in tmp_path.iterdir()] == ["a.arrow"]


def test_others_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_block(tmp_path / "a.arrow", [rows()])
    finally:
        os.umask(before)
    assert (tmp_path / "a.arrow").stat().st_mode & 0o777 == 0o644


def test_blocks_of_earlier_versions_are_read() -> None:
    table = open_block(GOLDEN)
    assert block.FORMAT == 1
    assert table.to_pylist() == rows().to_pylist()
    assert Rows.from_table(table)["image"].dtype == np.uint8
    assert facts_of(table) == {"bad_rows": 1, "bad": [[0, 3, "label is missing"]]}
