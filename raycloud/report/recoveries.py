"""What a summary says of the times in which a run stood still and went on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.events import Recovered


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
