"""The nodes that Ray drains: `ray drain-node`, an autoscaler, or SIGTERM to `ray start --block`.

On a draining node Ray places nothing more. What runs there goes on until whoever drains it ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Private: no public call tells of draining nodes. Ray Data and Ray Train call this one themselves,
# and it needs no dashboard. Tests on a cluster and without one hold it.
from ray._private.state import state

from raycloud.preemption import PreemptionNotice

if TYPE_CHECKING:
    from raycloud.clock import Clock

REASON = "Ray drains its node"  # it keeps to itself what for, as long as the node lives


def draining(clock: Clock) -> dict[str, PreemptionNotice]:
    """The nodes that Ray drains now, by id, and when they will be gone: 0.3 ms, one call.

    Args:
        clock: To turn moments into seconds from now.
    """
    now_s, found = clock.unix_s(), dict[str, PreemptionNotice]()
    for node, until_ms in state.get_draining_nodes().items():
        deadline_s = max(0.0, until_ms / 1000 - now_s) if until_ms else None  # 0: there is none
        found[node] = PreemptionNotice(reason=REASON, deadline_s=deadline_s)
    return found
