"""What is done to a run on purpose: faults by schedule or by chance, on the run's own workers."""

from __future__ import annotations

from raycloud.faults.injector import (
    NO_CONNECTION,
    Hit,
    Injector,
    LocalProcesses,
    NoConnectionError,
    Processes,
)
from raycloud.faults.schedule import Action, Fault, check, drawn, load_schedule, schedule_text

__all__ = [
    "NO_CONNECTION",
    "Action",
    "Fault",
    "Hit",
    "Injector",
    "LocalProcesses",
    "NoConnectionError",
    "Processes",
    "check",
    "drawn",
    "load_schedule",
    "schedule_text",
]
