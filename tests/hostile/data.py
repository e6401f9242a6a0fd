"""Data files, and files of the block cache, that lie about themselves."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raycloud.clock import VirtualClock
from raycloud.data.block import DamagedBlock, open_block, write_block
from raycloud.data.cache import BlockCache
from raycloud.errors import DataError, RaycloudError
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from tests.hostile.jobs import Payload
from tests.hostile_forks import Case
from tests.one_process import prepare_here

_JOB = Job(task="a.py:A", steps=1, global_batch=8, micro_batch=4)


class Rows(Task):
    """Takes rows as they are."""

    model = data = loss = optimizer = None  # type: ignore[assignment]


Rows.__abstractmethods__ = frozenset()


def _prepare(folder: Path, path: Path | str, **how: Any) -> None:
    cache = BlockCache(folder / "cache")
    source = Source(path=str(path), **how)
    provided = prepare_here(_JOB, Rows(), Splits(train=source), cache, VirtualClock(1e10), None)
    for row in range(len(provided.train)):
        provided.train[row]


def _file(
    name: str,
    content: bytes | Callable[[Path], Any],
    says: str = "",
    error: type[Exception] = DataError,
    **how: Any,
) -> Case:
    def make(folder: Path) -> None:
        (folder / "data").mkdir()
        if callable(content):
            content(folder / "data" / name)
        else:
            (folder / "data" / name).write_bytes(content)

    return Case(
        make=make,
        open=lambda folder: _prepare(folder, folder / "data", **how),
        error=error,
        says=says or name,
    )


def _block(content: Callable[[Path], Any], says: str = "") -> Case:
    def make(folder: Path) -> None:
        write_block(folder / "a.arrow", [pa.table({"x": list(range(1000))})])
        content(folder / "a.arrow")

    return Case(
        make=make,
        open=lambda folder: open_block(folder / "a.arrow"),
        error=DamagedBlock,
        says=says or "a.arrow",
    )


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _bomb(size: int, block: bytes = b"a" * 2**20) -> bytes:
    out = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(out.compress(block) for _ in range(size // len(block))), out.flush()])


def _parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"x": list(range(1000)), "y": ["abc"] * 1000}), path)
    return path.read_bytes()


def _parquet_with(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        content = bytearray(_parquet(path))
        changed = change(content)
        path.write_bytes(content if changed is None else changed)

    return make


def _footed(content: bytearray) -> None:
    content[-8:-4] = struct.pack("<I", 2**31 - 1)


def _garbled(content: bytearray) -> None:
    length = struct.unpack("<I", content[-8:-4])[0]
    content[-8 - length : -8] = b"\x19\xfc" + b"\xff" * (length - 2)


def _pages(content: bytearray) -> None:
    content[4:60] = b"\xff" * 56


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _arrow_with(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        _arrow(pa.table({"x": list(range(1000))}), path)
        content = bytearray(path.read_bytes())
        changed = change(content)
        path.write_bytes(content if changed is None else changed)

    return make


def _offsets(path: Path) -> None:
    """Texts whose beginnings lie far outside of what the file holds."""
    offsets = pa.py_buffer(np.array([0, 2**30, 2**30 + 4, 4], np.int32))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcd")])
    _arrow(pa.table({"text": texts}), path)


def _indices(path: Path) -> None:
    """Entries of a dictionary that it does not have."""
    numbers = pa.array(np.full(10, 2**30, np.int32))
    column = pa.DictionaryArray.from_arrays(numbers, pa.array(["a"]), safe=False)
    _arrow(pa.table({"text": column}), path)


def _cache_lies(folder: Path) -> None:
    cache = BlockCache(folder / "cache")
    cache.copy_in("ab" * 16, [(folder / "data" / "a.arrow").read_bytes()])


def image_of(size: int) -> bytes:
    """A PNG that says it is of size x size pixels, all of which are black: nothing, compressed."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    pixels = _bomb_zlib(size * (size + 1))
    head = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def _bomb_zlib(size: int) -> bytes:
    out = zlib.compressobj(9)
    zeros = bytes(2**20)
    whole = [out.compress(zeros) for _ in range(size // 2**20)]
    return b"".join([*whole, out.compress(bytes(size % 2**20)), out.flush()])


def _text(name: str, content: bytes, says: str = "") -> Case:
    return _file(name, content, says, unit="line")


CASES = {
    "parquet: cut short": _file("a.parquet", _parquet_with(lambda c: c[: len(c) // 2])),
    "parquet: a footer of 2 GB": _file("a.parquet", _parquet_with(_footed)),
    "parquet: a footer of noise": _file("a.parquet", _parquet_with(_garbled)),
    "parquet: pages of noise": _file("a.parquet", _parquet_with(_pages)),
    "parquet: a pickle": _file("a.parquet", pickle.dumps(Payload())),
    "parquet: empty": _file("a.parquet", b""),
    "arrow: cut short": _file("a.arrow", _arrow_with(lambda c: c[: len(c) // 2])),
    "arrow: a stream with a head of 2 GB": _file(
        "a.arrow", b"\xff\xff\xff\xff" + b"\xff\xff\xff\x7f"
    ),
    "arrow: a footer of noise": _file(
        "a.arrow", _arrow_with(lambda c: c[:-60] + b"\xff" * 50 + c[-10:])
    ),
    "arrow: texts outside of the file": _file("a.arrow", _offsets),
    "arrow: numbers outside of the dictionary": _file("a.arrow", _indices),
    "csv: a pickle": _file("a.csv", pickle.dumps(Payload())),
    "csv: a million columns": _file("a.csv", b"a," * 10**6 + b"b\n"),
    "csv: the same name twice": _file("a.csv", b"a,a\n1,2\n"),
    "csv: one line of 300 MB, compressed": _file("a.csv.gz", _bomb(300 * 10**6)),
    "csv: not what it is compressed with": _file("a.csv.gz", b"\x1f\x8b" + b"\xff" * 100),
    "json: ever deeper": _file("a.jsonl", b'{"a":' * 200_000),
    "json: ever deeper lists in a row": _file(
        "a.jsonl", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    ),
    "json: one line of 300 MB, compressed": _file("a.jsonl.gz", _bomb(300 * 10**6)),
    "text: one line of 300 MB, compressed": _text("a.txt.gz", _bomb(300 * 10**6)),
    "text: a file of 300 MB, compressed": _file("a.txt.gz", _bomb(300 * 10**6), unit="file"),
    "text: noise": _file("a.txt", b"\xff\xfe" * 1000, unit="file", error=RaycloudError),
    "a pipe": _file("a.txt", os.mkfifo),
    "a pipe of rows": _file("a.parquet", os.mkfifo),
    "a link to nothing": _file("a.csv", lambda path: path.symlink_to("nothing")),
    "a link to itself": _file("a.csv", lambda path: path.symlink_to("a.csv")),
    "a device": Case(
        make=lambda folder: None,
        open=lambda folder: _prepare(folder, "/dev/zero", format="text"),
        error=DataError,
        says="/dev/zero",
    ),
    "no file at the end of the climb": Case(
        make=lambda folder: None,
        open=lambda folder: _prepare(folder, "../../outside/../../../nothing/*.csv"),
        error=DataError,
        says="no ",
    ),
    "a path with a zero byte": Case(
        make=lambda folder: None,
        open=lambda folder: _prepare(folder, "a\0/../../outside"),
        error=DataError,
        says="a",
    ),
    "a chain of file systems": Case(
        make=lambda folder: None,
        open=lambda folder: _prepare(folder, "reference://::file:///etc/passwd"),
        error=DataError,
        says="reference",
    ),
    "block: cut short": _block(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "block: a pickle": _block(lambda path: path.write_bytes(pickle.dumps(Payload()))),
    "block: 1 TB of nothing": _block(_sparse),
    "block: not one of raycloud's": _block(lambda path: _arrow(pa.table({"x": [1]}), path)),
    "block: with facts ever deeper": _block(
        lambda path: _arrow(
            pa.table({"x": [1]}).replace_schema_metadata({b"raycloud": b"[" * 200_000}), path
        )
    ),
    "block: with facts that are no object": _block(
        lambda path: _arrow(pa.table({"x": [1]}).replace_schema_metadata({b"raycloud": b"7"}), path)
    ),
    "block: another number of rows": _block(
        lambda path: _arrow(
            pa.table({"x": [1]}).replace_schema_metadata(
                {b"raycloud": json.dumps({"format": 1, "rows": 10**12, "facts": {}}).encode()}
            ),
            path,
        ),
        "rows",
    ),
    "block: a key that climbs": Case(
        make=lambda folder: None,
        open=lambda folder: BlockCache(folder / "cache").add("../../outside/x", [pa.table({})]),
        error=RaycloudError,
        says="outside",
    ),
}
