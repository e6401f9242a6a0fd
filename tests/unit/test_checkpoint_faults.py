"""Killed at every point of writing, publishing and retaining: a complete checkpoint stays."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.checkpoint import (
    Manifest,
    PartRecord,
    Store,
    latest,
    load,
    open_store,
    publish,
    retain,
    steps,
    verify,
)
from raycloud.checkpoint.payload import load_tensors, write_part
from tests.checkpoints import drafts

PARTS = 2


class Killed(BaseException):
    """The process ends here: nothing may catch it."""


class KillingStore:
    """A store whose process ends at its `fatal`-th moment.

    Moments are before and after each write and remove, and each chunk of a write. A killed writer
    cannot tidy up: what it had written so far stays as a draft.
    """

    def __init__(self, inner: Store, fatal: int) -> None:
        self._inner = inner
        self._fatal = fatal
        self.moments = 0

    def _moment(self) -> None:
        self.moments += 1
        if self.moments == self._fatal:
            raise Killed

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        written = bytearray()

        def watched() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                self._moment()
                half = bytes(chunk[: len(chunk) // 2])
                written.extend(half)
                yield half
                self._moment()
                written.extend(chunk[len(half) :])
                yield bytes(chunk[len(half) :])
            self._moment()

        self._moment()
        try:
            self._inner.write(name, watched())
        except Killed:
            self._leave_draft(name, bytes(written))
            raise
        self._moment()

    def _leave_draft(self, name: str, content: bytes) -> None:
        if not self._inner.place.startswith("memory"):
            path = Path(self._inner.place) / f"{name}.dead.draft"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._moment()
            self._inner.remove_all([name])
            self._moment()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def tensors_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        f"{rank}.weight": torch.arange(5.0) * step + rank,
        f"{rank}.steps": torch.tensor(step),
    }


def save(store: Store, step: int, *, keep: int) -> None:
    parts = [
        write_part(store, step=step, rank=rank, parts=PARTS, tensors=tensors_of(step, rank))
        for rank in range(PARTS)
    ]
    manifest = Manifest(
        step=step,
        epoch=0,
        offset=step,
        generation=1,
        samples_per_epoch=10_000,
        job={},
        values={"step": step},
        ledger={},
        parts=tuple(PartRecord.parse(part) for part in parts),
        raycloud_version="0",
        torch_version="0",
    )
    publish(store, manifest)
    retain(store, keep, newest=step)


def newest_complete(store: Store) -> int:
    """The step that a resume starts from, once everything in it has been compared bit for bit."""
    for step in steps(store):
        verify(store, load(store, step))  # an older one is never left in part either
    found = latest(store)
    assert found.skipped == ()
    assert found.manifest is not None
    step = found.manifest.step
    assert found.manifest.values == {"step": step}
    read = load_tensors(store, found.manifest)
    for rank in range(PARTS):
        for name, tensor in tensors_of(step, rank).items():
            assert torch.equal(read.pop(name), tensor)
    assert read == {}
    return step


@pytest.fixture(params=["local", "memory"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Fresh places, as many as asked for."""

    def fresh() -> Iterator[str]:
        while True:
            name = uuid.uuid4().hex
            yield str(tmp_path / name) if request.param == "local" else f"memory://{name}"

    return fresh()


def moments_of(place: str, keep: int) -> int:
    inner = open_store(place)
    save(inner, 100, keep=keep)
    save(inner, 200, keep=keep)
    counting = KillingStore(inner, 0)
    save(counting, 300, keep=keep)
    return counting.moments


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_anywhere_the_previous_or_the_new_one_loads(
    places: Iterator[str], keep: int
) -> None:
    moments = moments_of(next(places), keep)
    assert moments > 25
    seen = []
    for fatal in range(1, moments + 1):
        store = open_store(next(places))
        save(store, 100, keep=keep)
        save(store, 200, keep=keep)
        with pytest.raises(Killed):
            save(KillingStore(store, fatal), 300, keep=keep)
        seen.append(newest_complete(store))
        # The next run goes on, passes the same step, and leaves nothing of the killed one behind.
        save(store, 300, keep=keep)
        save(store, 400, keep=keep)
        assert newest_complete(store) == 400
        assert steps(store) == [300, 400][-keep:]
        expected = {f"step-{step:08d}" for step in steps(store)}
        assert {name.split("/")[0] for name in store.names()} == expected
        if keep == 1:
            assert drafts(store) == []
    assert seen == sorted(seen)
    assert set(seen) == {200, 300}


@pytest.mark.parametrize("again", [False, True])
def test_killed_while_writing_the_first_one_or_the_same_again(
    places: Iterator[str], again: bool
) -> None:
    """The same state at the same step gives the same bytes, so the published one stays sound."""
    counting = KillingStore(open_store(next(places)), 0)
    save(counting, 100, keep=1)
    for fatal in range(1, counting.moments + 1):
        store = open_store(next(places))
        if again:
            save(store, 100, keep=1)
        with pytest.raises(Killed):
            save(KillingStore(store, fatal), 100, keep=1)
        assert latest(store).skipped == ()
        if again or latest(store).manifest is not None:
            assert newest_complete(store) == 100
        save(store, 100, keep=1)
        assert newest_complete(store) == 100


def test_killed_twice(places: Iterator[str]) -> None:
    """A second kill at any point of the run that resumed after the first one."""
    moments = moments_of(next(places), 1)
    for first in range(1, moments + 1, 5):
        for second in range(1, moments + 1, 5):
            store = open_store(next(places))
            save(store, 200, keep=1)
            with pytest.raises(Killed):
                save(KillingStore(store, first), 300, keep=1)
            assert newest_complete(store) in {200, 300}
            with suppress(Killed):
                save(KillingStore(store, second), 300, keep=1)
            assert newest_complete(store) in {200, 300}
