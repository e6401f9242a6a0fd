"""What log, control and members are told first: the job, the machines, where a start goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raycloud import __version__
from raycloud.checkpoint import latest, withdraw
from raycloud.control import ControlSettings
from raycloud.errors import CheckpointError
from raycloud.events import MemberLost, Noticed, RolledBack, RunStarted
from raycloud.order import Position
from raycloud.training.config import MemberConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.checkpoint import Manifest, Store
    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.report.tally import Tally

SILENCE_S = 600.0  # a step, or measuring the held-out samples, may take minutes


def opening(session: Session, manifest: Manifest | None) -> list[Event]:
    """What is to be said first in the log of a start."""
    taken = session.taken
    started = RunStarted(
        job=session.job.name,
        version=__version__,
        resumed_from_step=manifest.step if manifest is not None and taken is None else None,
        taken_over=() if taken is None else taken.members,
    )
    if taken is not None:
        why = "it did not outlive its driver"
        return [started, *(MemberLost(member=m, reason=why) for m in taken.adoption.lost)]
    if not session.not_taken:
        return [started]
    what = "workers were left, and could not be taken over"
    return [started, Noticed(what=what, detail={"why": session.not_taken})]


def config_of(session: Session, data: Mapping[str, Any]) -> MemberConfig:
    """What all members are told, and where the data is."""
    return MemberConfig(
        member=-1,
        node="",
        address="",
        job=session.code.named_in(session.job),
        task=session.code,
        checkpoints=session.checkpoints,
        mark=session.mark,
        only_steps=session.only_steps,
        **data,
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
        gone = [(published, "it is not there any more")] if published else []
        named = "; ".join(f"that of step {at}: {why}" for at, why in found.skipped or gone)
        raise CheckpointError(
            f"no worker is left, and no checkpoint in {store.place} is sound ({named})",
            hint="put one back and --resume; --resume allow sets the run's files aside and begins "
            "again",
        )
    damaged = [
        Noticed(
            what=f"the checkpoint of step {at} is damaged and was passed over", detail={"why": why}
        )
        for at, why in found.skipped
    ]
    what = "its parameters are not finite, or come from a step that is left out"
    damaged += [
        Noticed(what=f"the checkpoint of step {at} is withdrawn", detail={"why": what})
        for at in withdrawn
    ]
    ledger = dict(found.manifest.ledger) if found.manifest is not None and step else {}
    return RolledBack(step=step, ledger=ledger), damaged


def settings_of(
    session: Session, manifest: Manifest | None, tally: Tally, capacity: int
) -> ControlSettings:
    """Everything that control knows before the first event.

    Args:
        session: The start.
        manifest: The checkpoint that it goes on from, if it does.
        tally: What the log of the run comes to.
        capacity: How many members the machines hold.
    """
    job, taken = session.job, session.taken
    step, position = 0, Position()
    if taken is not None:
        step, ledger, position = taken.ledger.next_step, taken.ledger.state(), taken.ledger.newest
        generation = max(taken.generation, tally.generation)
    elif manifest is not None:
        step, ledger = manifest.step, dict(manifest.ledger)
        position = Position(epoch=manifest.epoch, offset=manifest.offset)
        generation = max(manifest.generation, tally.generation) + 1
    else:
        ledger, generation = {}, 0
    return ControlSettings(
        min_workers=job.elastic.min_workers,
        max_workers=job.most_workers,
        silence_s=SILENCE_S,
        saves=job.checkpoint.every_steps == "auto",
        most_failed=job.checkpoint.most_failed,
        capacity=capacity,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        drop_last=job.drop_last,
        shares=job.elastic.shares,
        step=step,
        position=position,
        ledger=ledger if step else None,
        first_generation=generation,
        first_member=max(tally.spawned, default=-1) + 1,
    )
