"""Whether those that join take the state where all meet, or follow the others until it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.control.state import JobState
    from raycloud.events import StepsCommitted

_FORGETS = 1.25  # with each report: what was the best once need not hold any more
_PER_PARAMETER = 2  # values that an optimizer keeps beside each, as Adam does


def note_pace(state: JobState, event: StepsCommitted) -> None:
    """Take in how fast a member's last messages went, as far as their seconds show it.

    They waited for slower members, too, and for messages before them: no byte takes longer, and the
    least of the last few reports counts. How long steps take is noted, too.
    """
    if event.last_step > event.first_step:
        state.formed().step_s = event.wall_s / (event.last_step - event.first_step)
    if event.bytes_last:
        member, last_s = state.members[event.member], event.exchange_s / event.bytes_last
        member.pace_s = min(last_s, _FORGETS * member.pace_s)


def at_once(state: JobState, new: int) -> bool:
    """Whether all would wait but a moment for `new` members to take the state from one of them.

    Or less than what these compute in a step: they would follow for three steps at least, idle. Of
    the members' paces the best is the nearest to that of their links: the others waited.
    """
    settings, group = state.settings, state.holders()
    ready = next((m.ready for m in group if m.ready is not None), None)
    if ready is None:
        return False
    size = ready.state_bytes + _PER_PARAMETER * ready.gradient_bytes
    part_s = state.formed().step_s * new / (len(group) + new)
    most_s = max(settings.hand_over_s, settings.hand_over_steps * part_s)
    return size * min(m.pace_s for m in group) < most_s
