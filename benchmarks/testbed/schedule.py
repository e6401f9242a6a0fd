"""What is to happen to a bed and when, and making it happen.

A schedule is read from a file or made in code, checked as it is read, and asked for what is due;
`apply` does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from benchmarks.testbed.events import Action, Event, ScheduleError
from benchmarks.testbed.faults import Outcome, apply
from benchmarks.testbed.spec import HEAD, Spec

__all__ = ["Action", "Event", "Outcome", "Schedule", "ScheduleError", "apply"]


class Schedule:
    """Events in order, each given out once."""

    def __init__(self, events: Iterable[Event]) -> None:
        """A schedule that has not begun.

        Args:
            events: In any order; those of the same second keep theirs. A drain brings the kill at
                its deadline along, unless the node is killed or comes back before.
        """
        self.events = tuple(sorted(events, key=lambda event: event.at_s))
        kills = [
            _deadline(event) for n, event in enumerate(self.events) if self._killed_by_drain(n)
        ]
        self._left = sorted([*self.events, *kills], key=lambda event: event.at_s)

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read a YAML or JSON file: `{events: [...]}` with the fields of `Event`.

        Args:
            path: The file.

        Raises:
            ScheduleError: It cannot be read, or something in it cannot be; names the file.
        """
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ScheduleError(f"{path}: cannot be read: {error}") from error
        if (
            not isinstance(content, dict)
            or list(content) != ["events"]
            or not isinstance(content["events"], list)
        ):
            raise ScheduleError(f"{path}: not a mapping with a list `events` and nothing else")
        try:
            return cls(Event.read(value) for value in content["events"])
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None

    @property
    def next_s(self) -> float | None:
        """When the next event is due; None after the last."""
        return self._left[0].at_s if self._left else None

    def due(self, elapsed_s: float) -> tuple[Event, ...]:
        """The events that have become due since it was last asked, in order.

        Args:
            elapsed_s: Seconds since the schedule began.
        """
        number = sum(event.at_s <= elapsed_s for event in self._left)
        now, self._left = self._left[:number], self._left[number:]
        return tuple(now)

    def check(self, spec: Spec) -> None:
        """Check that it can happen to a bed: every node is known by the time it is named.

        Args:
            spec: The bed's.

        Raises:
            ScheduleError: An event names a node that is not there.
        """
        known = {HEAD, *(node.name for node in spec.nodes)}
        for event in self.events:
            if event.action == "add" and event.spec is not None:
                known.add(event.node)
            if event.node not in known:
                raise ScheduleError(
                    f"{event.action} at {event.at_s:g} s: node: {event.node!r} is not known by "
                    f"then; use one of {', '.join(sorted(known))}, or add it before with a spec"
                )

    def _killed_by_drain(self, number: int) -> bool:
        """Whether an event is a drain that is still on at its deadline."""
        drain = self.events[number]
        if drain.action != "drain":
            return False
        end_s = _deadline(drain).at_s
        return not any(
            event.node == drain.node
            and event.action in {"kill-node", "add"}
            and event.at_s <= end_s
            for event in self.events[number + 1 :]
        )


def _deadline(drain: Event) -> Event:
    return Event(at_s=drain.at_s + (drain.deadline_s or 0.0), action="kill-node", node=drain.node)
