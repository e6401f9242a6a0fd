"""That a machine is going to leave: the notices of clouds, and SIGTERM."""

from raycloud.preemption.leaving import Leaving
from raycloud.preemption.sigterm import on_sigterm
from raycloud.preemption.watch import Watch, watch_here

__all__ = ["Leaving", "Watch", "on_sigterm", "watch_here"]
