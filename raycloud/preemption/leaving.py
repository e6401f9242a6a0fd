"""What is said of a machine, or of a process, that is going to leave."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaving:
    """Somebody's word that a machine, or a process, is going to leave.

    Attributes:
        reason: Who says so, and why.
        deadline_s: Seconds, from when it is told, after which it is gone; None: nobody says, so it
            may go at once.
        certain: Whether it will leave; else it only may.
        node: Whether the whole node leaves; else only the process that tells it.
    """

    reason: str
    deadline_s: float | None = None
    certain: bool = True
    node: bool = True


def seconds_until(
    text: str, now_s: float, read: Callable[[str], datetime.datetime]
) -> float | None:
    """Seconds until the moment that is written there, at least 0; None where it cannot be read.

    Args:
        text: The moment; where it names no zone, in UTC.
        now_s: Seconds since 1970-01-01 UTC.
        read: Reads it.

    >>> seconds_until("1970-01-01T00:02:00Z", 30.0, datetime.datetime.fromisoformat)
    90.0
    """
    try:
        moment = read(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return max(0.0, moment.timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None
