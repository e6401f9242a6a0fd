"""Recoveries: the times in which a run stood still and went on, as every view of a run tells them.

Each has a `kind`. `status`, `report`, `compare` and `audit` count them here, so that they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import duration

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
"""What each kind is called where it is counted, in the order in which counts are told."""


def counts(recoveries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many there were of each kind, by the name of its count.

    >>> counts([{"kind": "resumed"}])
    {'lost': 0, 'rolled_back': 0, 'met_anew': 0, 'taken_over': 0, 'resumed': 1}
    """
    found = Counter(recovery["kind"] for recovery in recoveries)
    return {name: found[kind] for kind, name in NAMES.items()}


def counts_text(counted: Mapping[str, int]) -> str:
    """Counts as people read them.

    >>> counts_text({"lost": 2, "met_anew": 0, "resumed": 1}), counts_text({})
    ('2 lost, 1 resumed', 'none')
    """
    told = [f"{number} {name.replace('_', ' ')}" for name, number in counted.items() if number]
    return ", ".join(told) or "none"


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
        text += f", {steps} step{'' if steps == 1 else 's'} computed again"
    return text


def add_lost(recoveries: list[dict[str, Any]], t: float, step: int, event: MemberLost) -> None:
    """Take in a loss, which is open until the others go on; `step` steps count by then."""
    lost = {"kind": LOST, "t": t, "step": step, "member": event.member}
    recoveries.append({**lost, "reason": event.reason, "seconds": None})


def add_resumed(recoveries: list[dict[str, Any]], t: float, step: int, again: int) -> None:
    """Take in that a run goes on from its checkpoint of `step`; `again` steps are taken back."""
    close(recoveries)
    resumed = {"kind": RESUMED, "t": t, "step": step, "steps_again": again}
    recoveries.append({**resumed, "seconds": None, "lost_steps": again})


def add_taken_over(
    recoveries: list[dict[str, Any]], t: float, step: int, members: Sequence[int]
) -> None:
    """Take in that members go on with another driver: what was open goes on, too."""
    taken = {"kind": TAKEN_OVER, "t": t, "step": step, "seconds": None}
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


def add_recovered(
    recoveries: list[dict[str, Any]], t: float, step: int, event: Recovered, *, back: bool
) -> None:
    """Take in that training goes on, which closes what was open, or was not known before.

    Args:
        recoveries: As the summary has them; changed.
        t: When it was said, in unix seconds.
        step: Steps that count by then.
        event: What was said.
        back: It went back to a checkpoint.
    """
    seconds = event.resumed_s - event.detected_s
    told = ("generation", "cause", "detected_s", "resumed_s", "lost_steps")
    took = {"seconds": seconds, **{name: getattr(event, name) for name in told}}
    taken = [r for r in recoveries if r["kind"] == TAKEN_OVER][-1:]
    if taken and not {"lost_steps", "ended_run"} & taken[0].keys():
        taken[0].update(took)
    elif not event.lost:
        anew = {"kind": ROLLED_BACK if back else ANEW, "t": t - seconds, "step": step}
        recoveries.append({**anew, "reason": event.cause, **took})
    for recovery in (r for r in recoveries if r.get("member") in event.lost):
        recovery.update(took)
