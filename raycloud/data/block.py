"""A block: a file of rows that is mapped into memory, not read.

An Arrow IPC file, not compressed. Its schema carries one entry of metadata, `raycloud`: JSON with
the number of this format, how many rows there are, and facts that the writer wants to find again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from raycloud.bounded import json_value

FORMAT = 1
DRAFT = ".draft"

_META = b"raycloud"
_NOT_OF_CONTENT = frozenset(  # of the machine, or what it refuses
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO}
)


class DamagedBlock(Exception):
    """A block is missing, cut short, or no block: whoever opens it makes or fetches it again."""


def write_block(
    path: Path, tables: Iterable[pa.Table], facts: Mapping[str, Any] | None = None
) -> tuple[int, int]:
    """Write rows, all of one schema, as one record batch, with JSON-ready values for `facts_of`.

    The rows are held in memory until they are written. Where `path` is there already it is
    replaced; who has it mapped keeps the old one. No tables make a block without columns.

    Returns:
        Rows, and bytes of the file.

    Raises:
        OSError: The disk is full or fails.
        pa.ArrowInvalid: The tables' columns differ.
    """
    parts = [table.replace_schema_metadata(None) for table in tables]
    table = pa.concat_tables(parts) if parts else pa.table({})
    table = table.unify_dictionaries().combine_chunks()
    meta = {"format": FORMAT, "rows": len(table), "facts": dict(facts or {})}
    table = table.replace_schema_metadata({_META: json.dumps(meta, sort_keys=True)})

    def fill(file: BinaryIO) -> None:
        # Arrow's own file: through Python's, each buffer would be copied to bytes first.
        with pa.OSFile(str(file.name), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)

    return len(table), publish(path, fill)


def publish(path: Path, content: bytes | Callable[[BinaryIO], object]) -> int:
    """Give `path` its content, or what a function writes, all or nothing; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, draft = _draft(path)
    try:
        with file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_size
            draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error says more
            draft.unlink(missing_ok=True)
        raise
    return written


def _draft(path: Path) -> tuple[BinaryIO, Path]:
    """A new file beside `path`, locked: so those who clean up tell it from what the killed left."""
    while True:
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{DRAFT}")
        # 0666 less the umask: others may share the cache.
        file = open(  # noqa: SIM115  # Path.open takes no opener; the caller closes it
            draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o666)
        )
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, draft
        file.close()  # someone cleaned up before it was locked


def open_block(path: Path) -> pa.Table:
    """Map a block. Its columns are views of the file, and stay valid when it is removed.

    Raises:
        DamagedBlock: It is missing, cut short, of another format, or no block.
        OSError: The machine does not let it be opened; it may be whole.
        MemoryError: There is no memory to map it.
    """
    try:
        # The file is closed at once; what was mapped stays mapped as long as a column needs it.
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        _meta(table)
        table.validate()
    except FileNotFoundError:
        raise DamagedBlock(f"the block {path} is missing") from None
    except MemoryError:  # pa.ArrowMemoryError too
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno in _NOT_OF_CONTENT:
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        known = isinstance(error, ValueError) and not isinstance(error, pa.ArrowException)
        raise DamagedBlock(f"the block {path} {why if known else f'is damaged: {why}'}") from error
    return table


def facts_of(table: pa.Table) -> dict[str, Any]:
    """The facts that were given to `write_block`."""
    facts: dict[str, Any] = _meta(table)["facts"]
    return facts


def _meta(table: pa.Table) -> dict[str, Any]:
    text = (table.schema.metadata or {}).get(_META)
    if text is None:
        raise ValueError("is no block of raycloud")
    meta = json_value(text, constants=True)
    if not isinstance(meta, dict):
        raise ValueError("has facts that are no object")  # noqa: TRY004 - one error for all damage
    if meta.get("format") != FORMAT:
        raise ValueError(f"has format {meta.get('format')!r}, not {FORMAT}")
    if meta["rows"] != len(table):
        raise ValueError(f"has {len(table)} rows, not {meta['rows']}")
    return meta
