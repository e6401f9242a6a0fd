"""What is done to a run on purpose: faults by schedule or by chance, on the run's own workers."""

from __future__ import annotations

from raycloud.faults.injector import (
    NO_CONNECTION,
    Hands,
    Hit,
    Injector,
    LocalHands,
    NoConnectionError,
)
from raycloud.faults.schedule import Action, Fault, check, drawn, load_schedule, schedule_text

__all__ = [
    "NO_CONNECTION",
    "Action",
    "Fault",
    "Hands",
    "Hit",
    "Injector",
    "LocalHands",
    "NoConnectionError",
    "check",
    "drawn",
    "load_schedule",
    "schedule_text",
]
