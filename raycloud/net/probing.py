"""Links between members, measured before the first step: sums of growing messages, as steps send.

All members exchange at the same time over what carries their gradients, so no two of them are
measured apart, and the seconds do not grow with their number. The numbers summed are zeros of their
own; nothing that is trained takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from raycloud.net.transport import finish

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.lane import Lane
    from raycloud.net.transport import Transport

_SMALL_BYTES, _FIRST_BYTES = 2**14, 2**18
_ENOUGH_S, _AIM_S = 0.1, 0.15  # that the last message takes more than a small one: at least, about
_MOST_AIM_S = 1.0  # the same, where latency varies by more than that
_LEAST_GROWTH, _MOST_GROWTH = 1.5, 8  # from one message to the next
_SLOW_S = 0.5  # a first message that takes more is not followed by another one, if a step is less
_MOST_MESSAGES = 3  # that grow
_LIKE_A_STEP = 2  # messages
_LONG_S, _LONG_GROWTH = 2.0, 4  # of thin links: at most about so long, and so much larger
_EACH_BYTES = 4

Exchanged = tuple[tuple[int, float], ...]
"""Bytes of messages that were summed over members, and the seconds that each took."""


def probe_links(
    gradients: Transport,
    lane: Lane,
    *,
    most_bytes: int,
    step_bytes: int,
    device: torch.device,
    clock: Clock,
) -> Exchanged:
    """Sum messages over members, each larger than the one before, until one takes about 0.15 s.

    That is besides what a small one takes, for which latency counts; where that takes longer, until
    one takes twice as long again, since latency varies by as much. A link that holds traffic to a
    rate may let a burst pass first, which the messages before the last one use up: so there are two
    at least, unless the first takes half a second. On thin links, where the first takes 0.1 s and
    a step sends more, up to two follow that are like a step's, but of about two seconds at most and
    four times as large as the first, and the sooner counts: the first one on such a link loses
    packets, and says little of a step. All members make this call at the same point, and find the
    same: of each message the seconds of the member that it took longest.

    Args:
        gradients: What carries them.
        lane: The control lane, by which members agree to go on.
        most_bytes: Of a message: a gradient, not encoded.
        step_bytes: Of a message that sends as much as a step does: the same, encoded.
        device: Where gradients are.
        clock: The time.

    Raises:
        TransportError: The exchange broke, or the generation is over.
    """
    if gradients.size == 1 or most_bytes < _EACH_BYTES:
        return ()

    def seconds(size: int) -> float:
        numbers = torch.zeros(size // _EACH_BYTES, dtype=torch.float32, device=device)
        began_s = clock.monotonic_s()
        finish(gradients.all_reduce(numbers), lane.abandoned)
        return clock.monotonic_s() - began_s

    def agreed(*own_s: float) -> list[float]:
        return [max(column) for column in zip(*lane.gather(own_s), strict=True)]

    small = min(_SMALL_BYTES, most_bytes)
    seconds(small)  # waits for all, and may have to open connections
    size = min(_FIRST_BYTES, most_bytes)
    if size == small:
        [small_s] = agreed(seconds(small))
        return ((small, small_s),)
    small_s, took_s = agreed(seconds(small), seconds(size))
    found = [(small, small_s), (size, took_s)]
    if took_s - small_s >= _ENOUGH_S and size < step_bytes:
        grows = min(_LONG_S / took_s, _LONG_GROWTH)
        size = min(int(grows * size) // _EACH_BYTES * _EACH_BYTES, step_bytes)
        like: list[float] = []
        while took_s < _LONG_S and len(like) < _LIKE_A_STEP:
            [took_s] = agreed(seconds(size))
            like.append(took_s)
        return (*found, (size, min(like))) if like else tuple(found)
    enough_s, aim_s = max(_ENOUGH_S, small_s), min(max(_AIM_S, 2.0 * small_s), _MOST_AIM_S)
    while size < most_bytes and len(found) <= _MOST_MESSAGES:
        more_s = took_s - small_s
        if more_s >= (enough_s if len(found) > 2 else max(enough_s, _SLOW_S)):  # noqa: PLR2004 - one has grown
            break
        grows = aim_s / more_s if more_s > 0.0 else _MOST_GROWTH
        grows = min(max(grows, _LEAST_GROWTH), _MOST_GROWTH)
        size = min(int(grows * size) // _EACH_BYTES * _EACH_BYTES, most_bytes)
        [took_s] = agreed(seconds(size))
        found.append((size, took_s))
    return tuple(found)
