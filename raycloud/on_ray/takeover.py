"""Members that have outlived their driver: found by a later start of the run, and gone on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raycloud import __version__
from raycloud.checkpoint import Manifest
from raycloud.control.rendezvous import Adoption
from raycloud.errors import RaycloudError
from raycloud.events import MemberLost, Noticed, RunStarted
from raycloud.on_ray.session import Origin
from raycloud.on_ray.tenure import Tenure
from raycloud.order import Ledger, read_ledger
from raycloud.spec.load import dump_job

if TYPE_CHECKING:
    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.report.recorder import Recorder
    from raycloud.training.words import Survivor

_ANSWER_S = 4.0  # a member that says nothing for so long is frozen, or cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class Takeover:
    """Members to go on with.

    Attributes:
        survivors: They, by rank.
        actors: Their handles.
        ledger: What is committed, as the run's file has it.
        origin: The checkpoint from which they began; None: none.
        pipeline: What they call the data's pipeline.
        collators: What they call their collators.
        adoption: What control begins with.
    """

    survivors: tuple[Survivor, ...]
    actors: Mapping[int, Any]
    ledger: Ledger
    origin: Manifest | None
    pipeline: str
    collators: tuple[str, ...]
    adoption: Adoption

    def starts_at(self, session: Session) -> Origin:
        """Where the start goes on: at the end of the ledger's file."""
        started = RunStarted(
            job=session.job.name,
            version=__version__,
            taken_over=tuple(one.member for one in self.survivors),
        )
        why = "it did not outlive its driver"
        lost = (MemberLost(member=member, reason=why) for member in self.adoption.lost)
        return Origin(
            manifest=self.origin,
            step=self.ledger.next_step,
            position=self.ledger.newest,
            ledger=self.ledger.state(),
            generation=max(one.newest for one in self.survivors),
            opening=(started, *lost),
        )


@contextlib.contextmanager
def held(
    session: Session, recorder: Recorder
) -> Iterator[tuple[Tenure, Takeover | None, tuple[Event, ...]]]:
    """Let what a start makes outlive it if it is killed; and take over what the last one has left.

    Yields:
        What makes and holds its processes, the members to go on with, and what the log is told of
        those that were left and could not be taken over: they have ended.

    Raises:
        RunDirectoryError: Another driver drives the run.
    """
    tenure = Tenure.follow(session, recorder) if session.resume else None
    found: Takeover | None = None
    told: tuple[Event, ...] = ()
    if tenure is not None:
        try:
            found, why = _found(session, recorder, tenure)
        except BaseException:
            tenure.close()
            raise
        if found is None:
            tenure.close()
            tenure = None
            what = "workers were left, and could not be taken over"
            told = (Noticed(what=what, detail={"why": why}),)
    tenure = tenure or Tenure.begin(session, recorder)
    try:
        if found is None:
            tenure.remember(_alike(session))
        yield tenure, found, told
    finally:
        tenure.close()


def _found(session: Session, recorder: Recorder, tenure: Tenure) -> tuple[Takeover | None, str]:
    """The members to go on with; or why there are none."""
    known, actors, collators = tenure.found()
    if "pipeline" not in (known or {}):  # a keeper of an older version says None
        return None, "they had not begun"
    for name, value in _alike(session).items():
        if known[name] != value:
            return None, f"the {name} is another one"
    ready = {member: actor for member, actor in actors.items() if member in recorder.tally.ready}
    survivors = _survivors(ready, recorder.written, tenure.number)
    if not survivors:
        return None, "none of them has the state of the training"
    if any(one.grown for one in survivors):
        return None, "the data has grown since they began"
    try:
        with session.directory.ledger.open(encoding="utf-8") as file:
            ledger = read_ledger(file)
    except RaycloudError as error:
        return None, error.message
    if ledger.sizes.most != survivors[0].ready.samples:
        return None, "the ledger is of other data"
    members = {one.member for one in survivors}
    tenure.keep(tuple(members))
    reported = recorder.tally.reported
    published = recorder.tally.checkpoint
    adoption = Adoption(
        readies=tuple(one.ready for one in survivors),
        steps=reported,
        skips={m: skips for m, skips in recorder.fold.skips.items() if m in members},
        lost=tuple(m for m in _newest(survivors).members if m not in members),
        changes=max(one.changes for one in survivors),
        published=None if published is None else published.step,
        began_s=session.began_s,
    )
    origin = known["origin"]
    return Takeover(
        survivors=survivors,
        actors={one.member: actors[one.member] for one in survivors},
        ledger=ledger,
        origin=None if origin is None else Manifest.from_bytes(origin, "what the run began with"),
        pipeline=known["pipeline"],
        collators=collators,
        adoption=adoption,
    ), ""


def _alike(session: Session) -> dict[str, Any]:
    """What has to be the same for members to go on as they are; else it is another run by now."""
    return {
        "version of raycloud": __version__,
        "job": dump_job(session.written),
        "task's code": session.code.digest,
    }


def _survivors(
    actors: Mapping[int, Any], written: Mapping[int, int], driver: int
) -> tuple[Survivor, ...]:
    """Those of the newest generation that answer and have the state, by rank."""
    calls = {actor.survivor.remote(written.get(m, 0), driver): m for m, actor in actors.items()}
    if not calls:
        return ()
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S)
    found: dict[int, Survivor] = {}
    for call in answered:
        with contextlib.suppress(RayError):  # it has died
            one = ray.get(call)
            if one is not None:
                found[one.member] = one
    members = _newest(tuple(found.values())).members if found else ()
    return tuple(found[member] for member in members if member in found)


def _newest(survivors: tuple[Survivor, ...]) -> Survivor:
    """One that has stood in the newest generation: others may be on their way into it."""
    return max(survivors, key=lambda one: one.generation)
