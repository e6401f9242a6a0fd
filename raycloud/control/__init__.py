"""What happens next in one job: events in, commands out.

The tables say which event may come when. No clock, no I/O, no randomness.
"""

from raycloud.control.machine import Control
from raycloud.control.settings import ControlSettings
from raycloud.control.tables import Condition, MemberState, Phase

__all__ = ["Condition", "Control", "ControlSettings", "MemberState", "Phase"]
