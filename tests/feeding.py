"""What a contestant of the feeding benchmark would have measured."""

from __future__ import annotations

from typing import Any


def row(feeder: str, repeat: int, *walls: tuple[str, bool, float]) -> dict[str, Any]:
    return {
        "feeder": feeder,
        "repeat": repeat,
        "epochs": [
            {"kind": kind, "shuffled": shuffled, "wall_s": wall_s, "sums": {"rows": 100}}
            for kind, shuffled, wall_s in walls
        ],
    }
