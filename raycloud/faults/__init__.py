"""What is done to a run on purpose: faults by schedule or by chance, on the run's own workers."""

from __future__ import annotations

from raycloud.faults.injector import Hit, Injector
from raycloud.faults.processes import Hands, LocalHands
from raycloud.faults.schedule import Action, Fault, check, drawn, load_schedule, schedule_text

__all__ = [
    "Action",
    "Fault",
    "Hands",
    "Hit",
    "Injector",
    "LocalHands",
    "check",
    "drawn",
    "load_schedule",
    "schedule_text",
]
