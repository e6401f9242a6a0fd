"""TensorBoard's event file, written without TensorBoard's own writer.

That one costs 0.2 s to import (tensorboardX: 1 s, and it imports torch); the messages alone cost
0.02 s. A file is a sequence of records: length as little-endian uint64, its masked CRC-32C, the
serialized `Event`, its masked CRC-32C (TensorFlow, "TFRecords format details").
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


class ScalarFile:
    """One new event file in `folder`; readers merge a folder's files in the order of their names.

    Args:
        folder: Where the file goes; it is made if missing.
        t: Unix seconds; part of the file's name.
        first_step: The step after which this file goes on. Readers drop points that older files
            hold beyond it: a resumed run takes them back.
    """

    def __init__(self, folder: Path, t: float, *, first_step: int = 0) -> None:
        """Open the file and write its head."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - off the start

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        path = folder / f"events.out.tfevents.{int(t):010d}.raycloud.{number:04d}"
        self._file = path.open("xb")
        self._write(self._event(wall_time=t, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=t, step=first_step + 1, session_log=start))
        self._file.flush()

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Append one point per tag at `step`, and flush."""
        summary = self._summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(self._event(wall_time=t, step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Close the file; more than once is fine."""
        self._file.close()

    def _write(self, event: Any) -> None:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))

    def __enter__(self) -> Self:
        """This file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
