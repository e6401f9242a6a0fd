"""What a member says of itself once it has built everything, before the others meet it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from raycloud.events import MemberReady
from raycloud.step.state import digest

if TYPE_CHECKING:
    from raycloud.step.replica import Replica
    from raycloud.training.config import MemberConfig
    from raycloud.training.fingerprint import Seen


def ready(
    config: MemberConfig, replica: Replica, *, data: Seen, speed: tuple[float, float]
) -> MemberReady:
    """How much it trains, how fast, and from what state.

    Args:
        config: What it was told.
        replica: Its own, as it begins.
        data: What it sees of the data.
        speed: `fixed_s` and `micro_batch_s`.

    Raises:
        TaskError: The optimizer or the schedule holds what no checkpoint could carry.
    """
    tensors = replica.state.tensors()
    replica.state.check()
    return MemberReady(
        member=config.member,
        samples=data.samples,
        held_out=data.held_out,
        fingerprint=data.fingerprint,
        parameters=replica.parameters,
        state_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
        gradient_bytes=replica.gradients.gradient_bytes,
        fixed_s=speed[0],
        micro_batch_s=speed[1],
        state_digest=digest(tensors.items()),
        node=config.node,
        price_per_hour=config.price_per_hour,
        pid=os.getpid(),
        processor=replica.processor,
    )
