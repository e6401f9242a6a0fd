"""Travel: by which point of the space of exchanges a replica's updates go, changed in its run.

All members change between two steps, where their generation ends. Parameters, optimizer, moments
and schedule are as they were. What encoding has lost is kept: with another codec it goes with the
next step's gradients as ever, and without one it goes with them whole. So what members keep, and
what they have applied, adds up to all gradients. What was lost of gradients is none of what rounds
move, nor the other way round: where a run changes between steps and rounds it is left behind, and
said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.step.mutation import has_modes
from raycloud.sync.strategy import changed_to

if TYPE_CHECKING:
    from raycloud.events import SyncPoint
    from raycloud.step.replica import Replica


def no_rounds(replica: Replica) -> str:
    """Why its steps cannot be made in rounds, by its model and optimizer; empty: they can."""
    if has_modes(replica.optimizer):
        return f"{type(replica.optimizer).__name__} keeps averages of the parameters itself"
    if replica.tables is not None:
        return "servers have the rows of its tables, which are told of each step"
    if replica.gradients.sparse_bytes:
        return "the gradients of its embeddings are sparse"
    return ""


def travel_by(replica: Replica, point: SyncPoint) -> None:
    """Go by this point from the next exchange on; without effect where it is in force.

    `connect` comes next, with connections of this point. What is computed of a step that broke is
    kept, unless rounds have another length now: then it is computed anew, from where it began.
    """
    if replica.point == point:
        return
    rounds = replica.rounds
    if rounds is None and not no_rounds(replica):
        rounds = replica.make_rounds()
    period = 1 if rounds is None else rounds.choice.period
    if replica.kept is not None and (replica.local or point.period > 1) and period != point.period:
        replica.discard()
    if rounds is not None:
        rounds.pin(point.period)
    replica.gradients.travel_by(changed_to(point, replica.gradients.residual))
    residual = replica.residual or replica.make_residual()
    left, of_updates = residual.norm, residual.of_updates
    if left > 0.0 and of_updates != (point.period > 1):
        replica.notice(
            "what encoding had lost is left behind, as steps are no longer made in rounds"
            if of_updates
            else "what encoding had lost is left behind, as steps are made in rounds from here on",
            {"norm": float(f"{left:.3g}")},
        )
    replica.point = point
