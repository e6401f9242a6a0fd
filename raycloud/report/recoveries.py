"""Recoveries: the times in which a run stood still and went on.

Each is a record with a `kind`. `status`, `report`, `compare` and `audit` count them here, so that
they agree. The functions that add one change the list that they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import counted, duration

if TYPE_CHECKING:
    from raycloud.events import MemberLost, Recovered

LOST, ROLLED_BACK, ANEW = "member lost", "rolled back", "met anew"
TAKEN_OVER, RESUMED = "taken over", "resumed"
NAMES = {
    LOST: "lost",
    ROLLED_BACK: "rolled_back",
    ANEW: "met_anew",
    TAKEN_OVER: "taken_over",
    RESUMED: "resumed",
}
"""What each kind is called where it is counted, in the order in which counts are shown."""


def counts(recoveries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many there were of each kind, by the name of its count.

    >>> counts([{"kind": "resumed"}])
    {'lost': 0, 'rolled_back': 0, 'met_anew': 0, 'taken_over': 0, 'resumed': 1}
    """
    found = Counter(recovery["kind"] for recovery in recoveries)
    return {name: found[kind] for kind, name in NAMES.items()}


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts as people read them.

    >>> counts_text({"lost": 2, "met_anew": 0, "resumed": 1}), counts_text({})
    ('2 lost, 1 resumed', 'none')
    """
    texts = [f"{number} {name.replace('_', ' ')}" for name, number in counts.items() if number]
    return ", ".join(texts) or "none"


def text_of(recovery: Mapping[str, Any]) -> str:
    """One recovery as people read it, without its kind.

    >>> text_of({"kind": "resumed", "step": 20, "steps_again": 3, "seconds": 5.5, "lost_steps": 3})
    'at step 20, 5.5 s until training went on, 3 steps computed again'
    """
    text = f"at step {recovery['step']}"
    if recovery.get("member") is not None:
        text = f"member {recovery['member']} {text}"
    if recovery.get("seconds") is not None:
        text += f", {duration(recovery['seconds'])} until training went on"
    if steps := recovery.get("lost_steps"):
        text += f", {counted(steps, 'step')} computed again"
    return text


def add_lost(recoveries: list[dict[str, Any]], t: float, step: int, event: MemberLost) -> None:
    """Add a loss, which is open until the others go on; `step` steps count by then."""
    lost = {"kind": LOST, "t": t, "step": step, "member": event.member}
    recoveries.append({**lost, "reason": event.reason, "seconds": None})


def add_resumed(recoveries: list[dict[str, Any]], t: float, step: int, again: int) -> None:
    """Add a resume from the checkpoint of `step`; `again` steps are taken back."""
    close(recoveries)
    resumed = {"kind": RESUMED, "t": t, "step": step, "steps_again": again}
    recoveries.append({**resumed, "seconds": None, "lost_steps": again})


def add_taken_over(
    recoveries: list[dict[str, Any]], t: float, step: int, members: Sequence[int]
) -> None:
    """Add a takeover by another driver: what was open stays open."""
    taken = {"kind": TAKEN_OVER, "t": t, "step": step, "seconds": None}
    recoveries.append({**taken, "members": list(members)})


def add_formed(recoveries: list[dict[str, Any]], t: float) -> None:
    """Close what was open: members have met."""
    for recovery in recoveries:
        if recovery["seconds"] is None and not recovery.get("ended_run"):
            recovery["seconds"] = t - recovery["t"]


def close(recoveries: list[dict[str, Any]]) -> None:
    """Mark what is still open as the end of the run: no generation followed."""
    for recovery in (r for r in recoveries if r["seconds"] is None):
        recovery["ended_run"] = True


def add_recovered(
    recoveries: list[dict[str, Any]], t: float, step: int, event: Recovered, *, back: bool
) -> None:
    """Close the recoveries that `event` ends, or add the one that was not known before.

    Args:
        recoveries: As the summary has them; changed.
        t: When it was logged, in unix seconds.
        step: Steps that count by then.
        event: What was logged.
        back: Training went back to a checkpoint.
    """
    names = ("seconds", "generation", "cause", "detected_s", "resumed_s", "lost_steps")
    took = {name: getattr(event, name) for name in names}
    taken = [r for r in recoveries if r["kind"] == TAKEN_OVER][-1:]
    if taken and not {"lost_steps", "ended_run"} & taken[0].keys():
        taken[0].update(took)
    elif not event.lost:
        anew = {"kind": ROLLED_BACK if back else ANEW, "t": t - event.seconds, "step": step}
        recoveries.append({**anew, "reason": event.cause, **took})
    for recovery in (r for r in recoveries if r.get("member") in event.lost):
        recovery.update(took)
