"""A source is sampled: over real HTTP and S3, and by a clock against closed forms."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.data import sampling
from raycloud.data.location import File, read_part
from raycloud.data.sampling import SAMPLED_S, sample
from raycloud.errors import DataError
from raycloud.task import Source
from tests.stores import Store, serving

MIB = 2**20


class Link:
    """A store whose link carries so much; each request waits before it does."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float, latency_s: float) -> None:
        self.clock, self.bytes_per_s, self.latency_s = clock, bytes_per_s, latency_s
        self.asked: list[tuple[str, int, int]] = []
        self._turn = threading.Lock()

    def part(self, _: Source, path: str, start: int, stop: int) -> bytes:
        with self._turn:
            self.asked.append((path, start, stop))
            self.clock.advance(self.latency_s + (stop - start) / self.bytes_per_s)
        return bytes(stop - start)


def files(count: int, size: int) -> list[File]:
    return [
        File(path=f"http://h/{at}", bytes=size, modified_ns=None, tag=None) for at in range(count)
    ]


def sampled(monkeypatch: pytest.MonkeyPatch, link: Link, found: list[File]) -> Any:
    monkeypatch.setattr(sampling, "read_part", link.part)
    return sample(Source(path="http://h/"), link.clock, 1, found)


def test_of_large_files_the_latency_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(VirtualClock(), 4e6, 0.1)
    one = sampled(monkeypatch, link, files(3, 100 * MIB))
    assert (one.files, one.bytes) == (3, 300 * MIB)
    assert one.latency_s == pytest.approx(0.1, rel=1e-4)
    assert one.bytes_per_s == pytest.approx(4e6, rel=1e-4)
    assert SAMPLED_S <= link.clock.monotonic_s() < SAMPLED_S + 1.0


def test_of_small_files_it_is_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(VirtualClock(), 4e6, 0.005)
    one = sampled(monkeypatch, link, files(5000, 20_000))
    assert one.latency_s == 0.0
    assert one.bytes_per_s == pytest.approx(20_000 / (0.005 + 20_000 / 4e6))
    assert all((start, stop) == (0, 20_000) for _, start, stop in link.asked)
    places = sorted(int(path.rpartition("/")[2]) for path, _, _ in link.asked)
    assert places[-1] > 4500  # not only the first ones


def test_a_source_that_is_read_sooner_is_read_whole_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link(VirtualClock(), 1e9, 0.0001)
    one = sampled(monkeypatch, link, files(10, 20_000))
    assert sorted(path for path, _, _ in link.asked) == [f"http://h/{at}" for at in range(10)]
    assert one.bytes == 200_000


def test_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(VirtualClock(), 1e5, 0.0)
    one = sampled(monkeypatch, link, files(2, 10 * MIB))
    assert one.bytes_per_s == pytest.approx(1e5, rel=1e-4)


def test_over_http() -> None:
    store = Store(files={f"/{at}.txt": b"x" * (2 * MIB + at) for at in range(3)})
    with serving(store) as there:
        source = Source(path=[f"{there.url}/{at}.txt" for at in range(3)])
        one = sample(source, SystemClock(), 2)
        assert (one.files, one.bytes, one.readers) == (3, 6 * MIB + 3, 2)
        assert one.latency_s > 0.0
        assert one.bytes_per_s > 1e5
        path = f"{there.url}/2.txt"
        assert read_part(source, path, 5, 9) == b"xxxx"


def test_what_cannot_be_read_is_an_error_that_names_it() -> None:
    store = Store(files={"/a.txt": b"text"})
    with serving(store) as there:
        source = Source(path=f"{there.url}/a.txt")
        gone = [File(path=f"{there.url}/b.txt", bytes=4, modified_ns=None, tag=None)]
        with pytest.raises(DataError, match="does not belong"):
            sample(source, SystemClock(), 1, gone)
