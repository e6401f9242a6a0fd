"""What shall happen: inventory and profile in, `Plan` out.

Everything here is arithmetic on values: no torch, no Ray, no clock, no I/O. The same input gives
the same plan.
"""

from raycloud.planner.inventory import (
    Inventory,
    Node,
    capacity,
    place,
    require,
)
from raycloud.planner.plan import (
    Plan,
    PlannedMember,
    Prediction,
    Profile,
    exposed_seconds,
    from_json,
    make,
)
from raycloud.planner.shares import (
    better_shares,
    equal_shares,
    first_shares,
    fit_shares,
    load,
    step_seconds,
)
from raycloud.planner.speed import NO_LIMIT, Speed, SpeedEstimate, Speeds

__all__ = [
    "NO_LIMIT",
    "Inventory",
    "Node",
    "Plan",
    "PlannedMember",
    "Prediction",
    "Profile",
    "Speed",
    "SpeedEstimate",
    "Speeds",
    "better_shares",
    "capacity",
    "equal_shares",
    "exposed_seconds",
    "first_shares",
    "fit_shares",
    "from_json",
    "load",
    "make",
    "place",
    "require",
    "step_seconds",
]
