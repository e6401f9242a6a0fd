"""What a summary says of the times in which a run stood still and went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.events import MemberLost, Recovered


def add_lost(recoveries: list[dict[str, Any]], t: float, step: int, event: MemberLost) -> None:
    """Take in a loss, which is open until the others go on; `step` steps count by then."""
    lost = {"kind": "member lost", "t": t, "step": step, "member": event.member}
    recoveries.append({**lost, "reason": event.reason, "seconds": None})


def add_resumed(recoveries: list[dict[str, Any]], t: float, step: int, again: int) -> None:
    """Take in that a run goes on from its checkpoint of `step`; `again` steps are taken back."""
    close(recoveries)
    resumed = {"kind": "resumed", "t": t, "step": step, "steps_again": again}
    recoveries.append({**resumed, "seconds": None, "lost_steps": again})


def add_taken_over(
    recoveries: list[dict[str, Any]], t: float, step: int, members: Sequence[int]
) -> None:
    """Take in that members go on with another driver: what was open goes on, too."""
    taken = {"kind": "taken over", "t": t, "step": step, "seconds": None}
    recoveries.append({**taken, "members": list(members)})


def add_formed(recoveries: list[dict[str, Any]], t: float) -> None:
    """Take in that members have met: what was open is over."""
    for recovery in recoveries:
        if recovery["seconds"] is None and not recovery.get("ended_run"):
            recovery["seconds"] = t - recovery["t"]


def close(recoveries: list[dict[str, Any]]) -> None:
    """What no generation followed was not recovered from: it ended the run."""
    for recovery in (r for r in recoveries if r["seconds"] is None):
        recovery["ended_run"] = True


def add_recovered(recoveries: list[dict[str, Any]], t: float, step: int, event: Recovered) -> None:
    """Take in that training goes on, which closes what was open, or was not known before.

    Args:
        recoveries: As the summary has them; changed.
        t: When it was said, in unix seconds.
        step: Steps that count by then.
        event: What was said.
    """
    seconds = event.resumed_s - event.detected_s
    told = ("generation", "cause", "detected_s", "resumed_s", "lost_steps")
    took = {"seconds": seconds, **{name: getattr(event, name) for name in told}}
    taken = [r for r in recoveries if r["kind"] == "taken over"][-1:]
    if taken and not {"lost_steps", "ended_run"} & taken[0].keys():
        taken[0].update(took)
    elif not event.lost:
        anew = {"kind": "met anew", "t": t - seconds, "step": step}
        recoveries.append({**anew, "reason": event.cause, **took})
    for recovery in (r for r in recoveries if r.get("member") in event.lost):
        recovery.update(took)
