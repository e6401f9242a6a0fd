"""What members measured of themselves, as the planner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raycloud.planning.plan import Profile
from raycloud.planning.shares import Speed

if TYPE_CHECKING:
    from raycloud.events import MemberReady


def profile_of(readies: Sequence[MemberReady]) -> Profile:
    """The profile of a task, by the word of one member or more: sizes are the first one's."""
    first = readies[0]
    return Profile(
        samples=first.samples,
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        state_bytes=first.state_bytes,
        speeds=tuple(Speed(fixed_s=r.fixed_s, micro_batch_s=r.micro_batch_s) for r in readies),
    )
