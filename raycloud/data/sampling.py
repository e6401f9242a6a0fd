"""Sampling a source: some of it is read for two seconds, which tells what reading all takes.

It takes longer where a link is so thin that a part for each reader takes longer.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from raycloud.data.location import AT_ONCE, File, locate, read_part
from raycloud.spec.sizes import SourceRate

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.task import Source

SAMPLED_S = 2.0
_ASKED = 3  # files whose first byte is waited for, one after the other
_READERS, _STREAMS = 4, 32  # at most: they share a link, and each reads a part at least
_MANY = 4  # files for each stream: of fewer none is read without being counted
_PART = 2**20  # bytes that are asked for at a time; files that are smaller are rows, mostly


def sample(
    source: Source, clock: Clock, readers: int, files: list[File] | None = None
) -> SourceRate:
    """Read some of a source, as `readers` at once would.

    Small files are read whole, several by each reader, as rows are; of large ones parts.

    Args:
        source: With a path.
        clock: Of seconds.
        readers: Processes that read at once; four at most are tried.
        files: What `locate` has found of it; None: not looked for yet.

    Raises:
        DataError: Its files cannot be found, or read.
    """
    files = files or locate(source)
    size = sum(one.bytes for one in files)
    small = size < _PART * len(files)
    readers = min(readers, _READERS)
    streams = min(_STREAMS, readers * AT_ONCE) if small else readers
    latency_s = 0.0 if small else _latency_s(source, files, clock)
    turn, parts = threading.Lock(), _parts(files)

    def read(until_s: float) -> tuple[int, int]:
        """Bytes and requests of one stream, one at least."""
        came = asked = 0
        while not asked or clock.monotonic_s() < until_s:
            with turn:
                part = next(parts, None)
            if part is None:
                break
            came += len(read_part(source, *part))
            asked += 1
        return came, asked

    with ThreadPoolExecutor(streams, thread_name_prefix="raycloud-sample") as pool:
        if 4 * size < _PART * len(files) and len(files) > _MANY * streams:
            # Connections are made before it is timed.
            list(pool.map(read, [clock.monotonic_s()] * streams))
        began_s = clock.monotonic_s()
        found = pool.map(read, [began_s + SAMPLED_S] * streams)
        came, asked = map(sum, zip(*found, strict=True))
    took_s = clock.monotonic_s() - began_s
    took_s = max(took_s - asked * latency_s / streams, 0.1 * took_s, 1e-9)
    return SourceRate(
        files=len(files),
        bytes=size,
        latency_s=latency_s,
        bytes_per_s=max(1.0, came / took_s),
        readers=readers,
    )


def _latency_s(source: Source, files: list[File], clock: Clock) -> float:
    took_s = []
    for one in files[:: max(1, len(files) // _ASKED)][:_ASKED]:
        began_s = clock.monotonic_s()
        read_part(source, one.path, 0, 1)
        took_s.append(clock.monotonic_s() - began_s)
    return statistics.median(took_s)


def _parts(files: list[File]) -> Iterator[tuple[str, int, int]]:
    """Files far from each other first, each cut into parts: its path, from where, to where."""
    step = max(1, len(files) // 64)
    for file in itertools.chain.from_iterable(files[at::step] for at in range(step)):
        for start in range(0, file.bytes, _PART):
            yield file.path, start, min(file.bytes, start + _PART)
