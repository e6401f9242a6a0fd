"""Spot traces: how many machines a cloud let one user hold, as events of a bed.

A trace is a JSON file `{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, 0, ...]}`: the number
of machines held, one value every gap. Those of skypilot-org/spot-traces (NSDI'24) are named
`availability` or `preemption`, and both count machines held: read the other way, us-west-2c, where
a single machine was available 89% of the time, would have had none of four 79% of the time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.events import Event
from benchmarks.testbed.spec import NodeSpec

_S_PER_HOUR = 3600.0


class TraceError(Exception):
    """A trace that cannot be read, or a window that it does not hold."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a trace.

    Attributes:
        source: Where the trace is published.
        file: Its name there.
        start_hour: Hours from the trace's beginning.
        gap_s: Seconds of the trace from one value to the next.
        held: Machines held, by gap.
    """

    source: str
    file: str
    start_hour: float
    gap_s: float
    held: tuple[int, ...]

    @property
    def hours(self) -> float:
        """How long it is in the trace."""
        return len(self.held) * self.gap_s / _S_PER_HOUR

    @property
    def changes(self) -> int:
        """How often the number of machines changes."""
        return sum(a != b for a, b in itertools.pairwise(self.held))


# Six hours that begin and end with all four: one gradual and one sudden loss, twenty minutes with
# none, and times with one, two and three that are long enough to train in.
SPOT = Window(
    source="github.com/skypilot-org/spot-traces",
    file="preemption_4-node_aws-08-03-2023_us-east-1f_v100_1.json",
    start_hour=210,
    gap_s=300,
    held=(
        *(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 0),
        *(0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 2, 2),
        *(2, 2, 2, 3, 3, 4, 4, 4, 2, 2, 2, 2),
        *(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4),
        *(4, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1),
        *(3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4),
    ),
)


def read(path: Path, *, start_hour: float = 0.0, hours: float | None = None) -> Window:
    """A part of a trace in a file.

    Args:
        path: The file.
        start_hour: Hours from its beginning.
        hours: How long; None: to its end.

    Raises:
        TraceError: It is no trace, or is shorter than that.
    """
    try:
        content: Any = json.loads(path.read_text())
        gap_s, held = content["metadata"]["gap_seconds"], content["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: no trace with gap_seconds and data: {error!r}") from error
    if not _is_number(gap_s, float) or gap_s <= 0 or not isinstance(held, list):
        raise TraceError(f"{path}: gap_seconds: {gap_s!r}, or data, is of a wrong type")
    if wrong := [one for one in held if not _is_number(one, int) or one < 0]:
        raise TraceError(f"{path}: data: {wrong[0]!r} is no number of machines")
    first = round(start_hour * _S_PER_HOUR / gap_s)
    last = len(held) if hours is None else first + round(hours * _S_PER_HOUR / gap_s)
    if not 0 <= first < last <= len(held):
        raise TraceError(
            f"{path}: it has {len(held) * gap_s / _S_PER_HOUR:.1f} hours; there are none from "
            f"{start_hour:g} for {'the rest' if hours is None else f'{hours:g}'}"
        )
    return Window(
        source=str(path.parent),
        file=path.name,
        start_hour=start_hour,
        gap_s=gap_s,
        held=tuple(held[first:last]),
    )


def events(
    window: Window,
    nodes: Sequence[NodeSpec],
    *,
    seconds_per_hour: float = 60.0,
    notice_s: float = 0.0,
) -> tuple[Event, ...]:
    """What a window does to a bed whose nodes are all there when it begins.

    Who has been there longest goes first, and who has been away longest comes back first; so every
    node has its turn, and every replay is the same.

    Args:
        window: Of a trace.
        nodes: As many as it ever holds, or more.
        seconds_per_hour: How long an hour of the trace takes.
        notice_s: Seconds of notice before a node goes, in the time of the replay, at most a gap of
            it; 0: none, it is killed.

    Raises:
        TraceError: There are too few nodes, or the notice is too long.

    Example:
        >>> window = Window(source="", file="", start_hour=0, gap_s=600, held=(2, 1, 2))
        >>> nodes = [NodeSpec(name="n1"), NodeSpec(name="n2")]
        >>> [(e.at_s, e.action, e.node) for e in events(window, nodes)]
        [(10.0, 'kill-node', 'n1'), (20.0, 'add', 'n1')]
    """
    if max(window.held) > len(nodes):
        raise TraceError(
            f"{window.file}: it holds {max(window.held)} nodes, and there are {len(nodes)}; "
            "add nodes to the spec"
        )
    gap_s = window.gap_s / _S_PER_HOUR * seconds_per_hour
    if notice_s > gap_s:
        raise TraceError(f"notice_s: {notice_s:g} is longer than a gap; use at most {gap_s:g}")
    here, away = list(nodes), list[NodeSpec]()
    found = []
    for number, held in enumerate(window.held):
        at_s = number * gap_s
        for _ in range(len(here) - held):
            away.append(here.pop(0))
            found.append(_going(away[-1].name, at_s, notice_s))
        for _ in range(held - len(here)):
            here.append(away.pop(0))
            found.append(Event(at_s=at_s, action="add", node=here[-1].name, spec=here[-1]))
    return tuple(sorted(found, key=lambda event: event.at_s))


def _going(node: str, at_s: float, notice_s: float) -> Event:
    """How a node goes at a moment; nobody has notice of what happens at once."""
    if notice_s <= 0 or at_s == 0:
        return Event(at_s=at_s, action="kill-node", node=node)
    return Event(at_s=at_s - notice_s, action="drain", node=node, deadline_s=notice_s)


def _is_number(value: object, kind: type[float]) -> bool:
    kinds = int | float if kind is float else int
    return isinstance(value, kinds) and not isinstance(value, bool)
