"""A part is copied when it is asked for, and written while training goes on."""

from __future__ import annotations

import errno
import math
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from raycloud.checkpoint import LimitedStore, PartRecord, Store, decode
from raycloud.checkpoint.naming import blamed
from raycloud.checkpoint.payload import read_part
from raycloud.checkpoint.store import LocalStore
from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import TaskError
from raycloud.events import MemberFailed, PartFailed, PartWritten
from raycloud.worker.saver import AT_THE_END_S, Saver

Told = PartWritten | PartFailed | MemberFailed


class Gated(LocalStore):
    """A local store that writes when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.log: list[str] = []
        self.gate = threading.Event()
        self.began = threading.Event()
        self.removed = lambda: None

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.log.append(f"began {name}")
        self.began.set()
        assert self.gate.wait(20.0)
        try:
            super().write(name, chunks)
        finally:
            self.removed()
        self.log.append(f"ended {name}")


def saver(store: Store, told: list[Told]) -> Saver:
    return Saver(store, member=4, clock=SystemClock(), report=told.append)


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(8.0), "b": torch.ones(2, 3), "c": torch.tensor(5)}


def test_what_is_written_is_what_was_there_when_asked(tmp_path: Path) -> None:
    store, told = Gated(tmp_path), list[Told]()
    live = tensors()
    values = {"betas": (0.9, 0.95), "groups": [{"lr": 0.1}]}
    mine = saver(store, told)
    mine.save(step=7, rank=0, parts=1, tensors=live, values=values)
    assert store.began.wait(20.0)
    for tensor in live.values():
        tensor.zero_()
    values["groups"][0]["lr"] = 0.0  # type: ignore[index]
    assert told == []
    store.gate.set()
    mine.wait()
    (written,) = told
    assert isinstance(written, PartWritten)
    assert (written.member, written.step, written.part["rank"]) == (4, 7, 0)
    assert decode(written.part["values"]) == {"betas": (0.9, 0.95), "groups": [{"lr": 0.1}]}
    read = read_part(store, written.part["record"])
    assert read.keys() == tensors().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors().items())


def test_parts_make_the_whole(tmp_path: Path) -> None:
    store, told = LocalStore(tmp_path), list[Told]()
    for rank in range(3):
        mine = saver(store, told)
        mine.save(step=1, rank=rank, parts=3, tensors=tensors(), values={})
        mine.wait()
    found: dict[str, torch.Tensor] = {}
    for written in told:
        assert isinstance(written, PartWritten)
        part = read_part(store, PartRecord.parse(written.part["record"]))
        assert not found.keys() & part.keys()
        found |= part
    assert found.keys() == tensors().keys()


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    store, told = Gated(tmp_path), list[Told]()

    class Opens(VirtualClock):
        """The second save reads the clock before it waits: only then the first may end."""

        def monotonic_s(self) -> float:
            if store.began.is_set():
                store.gate.set()
            return super().monotonic_s()

    class Looks(dict[str, torch.Tensor]):
        """Says when it is looked at, to be copied."""

        def items(self):  # type: ignore[no-untyped-def]
            store.log.append("copied")
            return super().items()

    mine = Saver(store, member=4, clock=Opens(), report=told.append)
    mine.save(step=1, rank=0, parts=1, tensors=tensors(), values={})
    assert store.began.wait(20.0)
    mine.save(step=2, rank=0, parts=1, tensors=Looks(tensors()), values={})
    assert store.log[1:3] == [store.log[0].replace("began", "ended"), "copied"]
    mine.wait()
    assert [one.step for one in told if isinstance(one, PartWritten)] == [1, 2]
    mine.wait()


def test_seconds_are_those_blocked_and_those_written(tmp_path: Path) -> None:
    store, told = Gated(tmp_path), list[Told]()
    clock = VirtualClock()
    mine = Saver(store, member=0, clock=clock, report=told.append)
    mine.save(step=1, rank=0, parts=1, tensors=tensors(), values={})
    assert store.began.wait(20.0)
    clock.advance(3.0)
    store.gate.set()
    mine.wait()
    (written,) = told
    assert isinstance(written, PartWritten)
    assert (written.blocked_s, written.write_s) == (0.0, 3.0)


def test_a_store_that_cannot_write_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    told: list[Told] = []
    mine = saver(LocalStore(blocked / "below"), told)
    mine.save(step=1, rank=0, parts=1, tensors=tensors(), values={})
    mine.wait()
    (failed,) = told
    assert isinstance(failed, PartFailed)
    assert (failed.member, failed.step) == (4, 1)
    assert str(blocked) in failed.why
    assert failed.hint


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As where a disk is full: the system itself refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_there_is_no_room_training_goes_on_and_nothing_half_written_is_left(
    tmp_path: Path,
) -> None:
    store, told = LocalStore(tmp_path), list[Told]()
    mine = saver(store, told)
    large = {"a": torch.zeros(2**18)}
    with files_of_at_most(2**16):
        mine.save(step=1, rank=0, parts=1, tensors=large, values={})
        mine.wait()
    assert not store.sizes()
    mine.save(step=2, rank=0, parts=1, tensors=large, values={})
    mine.wait()
    failed, written = told
    assert isinstance(failed, PartFailed)
    assert (failed.step, failed.generation) == (1, 0)
    assert "File too large" in failed.why
    assert failed.hint
    assert isinstance(written, PartWritten)
    assert written.step == 2


class Refusing(LocalStore):
    """A store that refuses so many writes."""

    def __init__(self, root: Path, times: float) -> None:
        super().__init__(root)
        self.times = times

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.times > 0:
            self.times -= 1
            raise blamed("write", name, OSError(errno.EACCES, "not now"))
        super().write(name, chunks)


class Hurried(VirtualClock):
    """Whoever looks at it sees that a second has passed."""

    def monotonic_s(self) -> float:
        self.advance(1.0)
        return super().monotonic_s()


def test_the_last_part_is_written_again_until_the_store_takes_it(tmp_path: Path) -> None:
    told: list[Told] = []
    mine = Saver(Refusing(tmp_path, 3), member=4, clock=Hurried(), report=told.append)
    mine.save(step=9, rank=0, parts=1, tensors=tensors(), values={})
    mine.finish(lambda: False)
    assert [type(one) for one in told] == [PartFailed] * 3 + [PartWritten]
    mine.finish(lambda: False)
    assert len(told) == 4


def test_it_is_given_up_after_a_while_or_where_nobody_waits_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycloud.worker.saver._LOOK_UP_S", 0.001)  # real seconds
    told: list[Told] = []
    clock = Hurried()
    mine = Saver(Refusing(tmp_path, math.inf), member=4, clock=clock, report=told.append)
    mine.save(step=9, rank=0, parts=1, tensors=tensors(), values={})
    mine.finish(lambda: True)
    assert len(told) == 1
    mine.finish(lambda: False)
    assert {type(one) for one in told} == {PartFailed}
    assert AT_THE_END_S <= clock.monotonic_s() <= 2 * AT_THE_END_S


def test_an_upload_that_hangs_blocks_nobody_and_is_not_completed_later(tmp_path: Path) -> None:
    """The store takes the first bytes, and then nothing moves."""
    inner, told = Gated(tmp_path), list[Told]()
    mine = saver(LimitedStore(inner, least_s=0.05), told)
    mine.save(step=1, rank=0, parts=1, tensors=tensors(), values={})
    mine.wait()
    [failed] = told
    assert isinstance(failed, PartFailed)
    assert "no answer" in failed.why
    ended = threading.Event()
    inner.removed = ended.set
    inner.gate.set()
    assert ended.wait(20.0)
    assert not inner.sizes()
    mine.save(step=2, rank=0, parts=1, tensors=tensors(), values={})
    mine.wait()
    assert isinstance(told[-1], PartWritten)


def test_a_value_that_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    told: list[Told] = []
    with pytest.raises(TaskError, match="optimizer"):
        saver(LocalStore(tmp_path), told).save(
            step=1, rank=0, parts=1, tensors=tensors(), values={"optimizer": object()}
        )
    assert told == []
    assert not list(tmp_path.iterdir())
