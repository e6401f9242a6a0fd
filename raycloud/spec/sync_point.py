"""How updates travel, decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """A point in the space of exchanges: `SyncSection` with every auto decided."""

    period: int = 1
    topology: Literal["ring", "tree", "servers"] = "ring"
    staleness: int | Literal["unbounded"] = 0
    codec: str = "none"
