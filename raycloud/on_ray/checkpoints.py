"""Checkpoints as the driver sees them: published, retained, and found again to go on from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from raycloud import __version__
from raycloud.checkpoint import (
    DamagedError,
    Manifest,
    PartRecord,
    StoreError,
    decode,
    latest,
    publish,
    retain,
    steps,
    withdraw,
)
from raycloud.errors import CheckpointError, RunDirectoryError, SpecError
from raycloud.events import (
    CheckpointFailed,
    CheckpointPublished,
    Noticed,
    RolledBack,
    RunStarted,
)
from raycloud.on_ray.session import Origin
from raycloud.spec.rundir import NothingSavedError
from raycloud.spec.secrets import kept

if TYPE_CHECKING:
    from raycloud.checkpoint import Store
    from raycloud.commands import Publish
    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.spec import Job

_FIND_S = 300.0  # so long a checkpoint to go back to is looked for in a store that fails
_AGAIN_S = 1.0


def origin_of(session: Session, store: Store) -> Origin:
    """The beginning for a new run, the newest sound checkpoint for one that is resumed.

    Raises:
        RunDirectoryError: A new run would write among another run's checkpoints.
        NothingSavedError: A resumed one has none.
        SpecError: The run has already done more steps than are asked for.
    """
    if not session.resume:
        if there := steps(store):
            raise RunDirectoryError(
                f"{store.place} holds the checkpoints of another run (newest: step {there[-1]})",
                hint="give another checkpoint.path, or go on with that run: --resume --run-dir DIR",
            )
        return Origin(opening=(RunStarted(job=session.job.name, version=__version__),))
    found = latest(store)
    manifest = found.manifest
    if manifest is None:
        raise NothingSavedError(
            f"{session.directory.path} has no checkpoint to resume from",
            hint="--resume allow sets its files aside and begins again, or give another --run-dir",
        )
    asked = session.job.steps
    if asked is not None and asked < manifest.step:
        raise SpecError(
            "steps",
            asked,
            f"the run has done {manifest.step} steps already",
            hint=f"write steps {manifest.step} or more",
        )
    started = RunStarted(job=session.job.name, version=__version__, resumed_from_step=manifest.step)
    return Origin(
        manifest=manifest,
        step=manifest.step,
        position=manifest.position,
        ledger=dict(manifest.ledger),
        generation=manifest.generation,
        opening=(started, *_damaged(found.skipped)),
    )


def manifest_of(command: Publish, job: Job, *, samples: int, ledger: Mapping[str, Any]) -> Manifest:
    """Put together what the members reported; the job's secrets are left out.

    The ledger's state holds exactly the steps before the checkpoint's.
    """
    by_rank = sorted(command.parts.items())
    values_of: list[Mapping[str, Any]] = [decode(part["values"]) for _, part in by_rank]
    values = values_of[0]
    return Manifest(
        step=command.step,
        epoch=values["epoch"],
        offset=values["offset"],
        generation=values["generation"],
        samples_per_epoch=samples,
        job=kept(job.resolved()).model_dump(mode="json"),
        values={
            **values,
            "fuses": [one["fuse"] for one in values_of],
            "pass_sizes": [one["pass_size"] for one in values_of],
            "random": {"seed": job.seed},
        },
        ledger=ledger,
        parts=tuple(
            replace(PartRecord.parse(part["record"]), replica=replica, position=position)
            for (replica, position), part in by_rank
        ),
        raycloud_version=__version__,
        torch_version=torch.__version__,
    )


def found_back(
    store: Store,
    origin: Manifest | None,
    published: int | None = None,
    newest: int | None = None,
) -> tuple[RolledBack, list[Noticed]]:
    """The newest sound checkpoint, where no sound state is left; what is damaged is told.

    Args:
        store: Where checkpoints are.
        origin: The one that this start began with: members' data is laid out from there.
        published: Step of the newest that is known to have been there.
        newest: Those of later steps are not sound either, and are withdrawn.

    Raises:
        CheckpointError: The store cannot be read, or only older ones are sound, or none is that
            were there.
    """
    withdrawn = withdraw(store, newest) if newest is not None else ()
    found = latest(store)
    step = 0 if found.manifest is None else found.manifest.step
    if origin is not None and step < origin.step:
        raise CheckpointError(
            f"no sound state is left, and no checkpoint from step {origin.step} on is sound",
            hint="`raycloud train --resume` goes on from an older one, if there is any",
        )
    if published in withdrawn:
        published = None
    if found.manifest is None and (found.skipped or published):
        missing = [(published, "it is not there any more")] if published else []
        named = "; ".join(f"that of step {at}: {why}" for at, why in found.skipped or missing)
        raise CheckpointError(
            f"no worker is left, and no checkpoint in {store.place} is sound ({named})",
            hint="put one back and --resume; --resume allow sets the run's files aside and begins "
            "again",
        )
    detail = {"why": "its parameters are not finite, or come from a step that is left out"}
    gone = [
        Noticed(what=f"the checkpoint of step {at} is withdrawn", detail=detail) for at in withdrawn
    ]
    ledger = dict(found.manifest.ledger) if found.manifest is not None and step else {}
    return RolledBack(step=step, ledger=ledger), [*_damaged(found.skipped), *gone]


def _damaged(skipped: Iterable[tuple[int, str]]) -> list[Noticed]:
    what = "the checkpoint of step {} is damaged and was passed over"
    return [Noticed(what=what.format(at), detail={"why": why}) for at, why in skipped]


class CheckpointPublisher:
    """What a driver asks of the store, done one after the other in a thread of its own."""

    def __init__(self, store: Store, session: Session) -> None:
        self._store, self._session = store, session
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._found: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._under_way = 0  # as far as the driver has heard
        self._known: dict[int, Manifest] = {}  # those that are kept
        self._left = False  # what is not kept any longer could not be removed

    @property
    def busy(self) -> bool:
        """Something that was asked for is still to be heard of."""
        return self._under_way > 0 or not self._found.empty()

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:
        """Make a checkpoint whole, and remove those that are not kept any longer.

        `CheckpointPublished` or `CheckpointFailed` follows.
        """
        self._ask(partial(self._publish, command, samples, ledger))

    def find_back(self, find: Callable[[], tuple[RolledBack, list[Noticed]]]) -> None:
        """Find the checkpoint to go back to: what it returns follows."""
        self._ask(partial(self._find_back, find))

    def poll(self) -> list[Event]:
        """What has come of it since the last call.

        Raises:
            RaycloudError: What no other attempt would mend.
        """
        events = []
        while not self._found.empty():
            found = self._found.get()
            if isinstance(found, BaseException):
                raise found
            self._under_way -= not isinstance(found, Noticed)
            events.append(found)
        return events

    def close(self, wait_s: float) -> None:
        """Nothing more is begun; what is under way may end within so long."""
        self._over.set()
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)

    def _ask(self, work: Callable[[], None]) -> None:
        self._under_way += 1
        self._asked.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (work := self._asked.get()) is not None and not self._over.is_set():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised to who asks what has come of it
                self._found.put(error)

    def _publish(self, command: Publish, samples: int, ledger: Mapping[str, Any]) -> None:
        clock, began_s = self._session.clock, self._session.clock.monotonic_s()
        try:
            manifest = manifest_of(command, self._session.asked, samples=samples, ledger=ledger)
            publish(self._store, manifest)
        except CheckpointError as error:
            why, damaged = error.message, isinstance(error, DamagedError)
            self._found.put(
                CheckpointFailed(step=command.step, why=why, hint=error.hint, damaged=damaged)
            )
            return
        published = CheckpointPublished(
            step=manifest.step,
            path=f"{self._session.checkpoints}/step-{manifest.step:08d}",
            state_bytes=manifest.state_bytes,
            write_s=clock.monotonic_s() - began_s,
        )
        self._found.put(published)
        self._retain(manifest)

    def _retain(self, newest: Manifest) -> None:
        """What cannot be removed now may be after the next one; it is told once."""
        keep = self._session.job.checkpoint.keep
        self._known[newest.step] = newest
        self._known = {step: self._known[step] for step in sorted(self._known)[-keep:]}
        try:
            retain(self._store, keep, newest=newest.step, known=self._known)
            self._left = False
        except CheckpointError as error:
            if not self._left:
                what = "old checkpoints could not be removed; it is tried again after each new one"
                self._found.put(Noticed(what=what, detail={"why": error.message}))
            self._left = True

    def _find_back(self, find: Callable[[], tuple[RolledBack, list[Noticed]]]) -> None:
        clock = self._session.clock
        until_s, pause_s = clock.monotonic_s() + _FIND_S, _AGAIN_S
        while True:
            try:
                back, notices = find()
                break
            except StoreError as error:
                if clock.monotonic_s() >= until_s:
                    raise
                what = f"no checkpoint could be read; it is tried again in {pause_s:.0f} s"
                self._found.put(Noticed(what=what, detail={"why": error.message}))
            if self._over.wait(pause_s):
                return
            pause_s *= 2.0
        for notice in notices:
            self._found.put(notice)
        self._found.put(back)
