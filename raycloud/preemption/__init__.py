"""Preemption: notices of clouds, and SIGTERM, that a machine or a process is going to leave."""

from raycloud.preemption.clouds import PreemptionNotice
from raycloud.preemption.watch import Watch, on_sigterm, watch_here

__all__ = ["PreemptionNotice", "Watch", "on_sigterm", "watch_here"]
