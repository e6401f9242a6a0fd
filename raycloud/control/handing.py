"""Whether those that join take the state where all meet, or follow the others until it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import StepsCommitted

_FORGETS = 1.25  # with each report: what was the best once need not hold any more
_FOLLOWS = 3  # steps at least
_PER_PARAMETER = 2  # values that an optimizer keeps beside each, as Adam does


def note_pace(state: JobState, event: StepsCommitted) -> None:
    """Take in how fast a member's last messages went, as far as their seconds show it.

    They waited for slower members, too, and for messages before them: no byte takes longer, and the
    least of the last few reports counts.
    """
    if event.bytes_last:
        member, last_s = state.members[event.member], event.exchange_s / event.bytes_last
        member.pace_s = min(last_s, _FORGETS * member.pace_s)


def at_once(state: JobState, new: int) -> bool:
    """Whether all would wait but a moment for `new` members to take the state from them.

    It goes once over the link of each newcomer, at a time; from those who have it, together, it
    goes once for each, so that their links are the bound where newcomers are more than they are.
    Up to twice that is worth it where these would compute as long in three steps: they would be
    idle for as many at least. Of the members' paces the best is the nearest to that of their links:
    the others waited. Where they have exchanged nothing yet, those before them tell of their links.
    """
    moment_s, group = state.settings.hand_over_s, state.holders()
    ready = next((m.ready for m in group if m.ready is not None), None)
    if ready is None:
        return False
    size = ready.state_bytes + _PER_PARAMETER * ready.gradient_bytes
    pace_s = min(m.pace_s for m in group)
    if pace_s == float("inf"):
        pace_s = min(m.pace_s for m in state.members.values())
    takes_s = size * pace_s * max(1.0, new / len(group))
    idle_s = _FOLLOWS * state.formed().took.usual_s * new / (len(group) + new)
    return takes_s < min(max(idle_s, moment_s), 2 * moment_s)
