"""How much of what its workers could do a run has done, while they were lost and replaced.

    python -m benchmarks.present RUN_DIRECTORY [...]

What they could do is what the run itself does while nothing happens, with as many as are there: a
worker is there from when it is ready until it is lost. So what is left out is what computing
together costs at all, and how long a replacement takes to start; what counts are broken steps, the
meetings, shares that do not fit, and newcomers that are ready and do not compute yet. The window is
as long before the first loss and after the last one as half of the time between two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from raycloud.errors import RaycloudError
from raycloud.events import Event, GenerationFormed, MemberLost, MemberReady, StepsCommitted
from raycloud.report.log import read_events


@dataclass(frozen=True, kw_only=True)
class Present:
    """What came of a window.

    Attributes:
        losses: Workers that were lost in it.
        steps: That were committed in it.
        undisturbed_s: Mean seconds of a step of all workers while nothing happened.
        workers: How many were there in the mean.
        most: How many there were at most.
        window_s: Its length.
    """

    losses: int
    steps: int
    undisturbed_s: float
    workers: float
    most: int
    window_s: float

    @property
    def goodput(self) -> float:
        """Steps that were done, over those that who was there could have done."""
        return self.steps * self.undisturbed_s / (self.window_s * self.workers / self.most)


def present(log: Iterable[tuple[float, Event]]) -> Present:
    """Measure a run's log.

    Args:
        log: Its events, with their seconds.

    Raises:
        ValueError: Fewer than two workers were lost, or all were never there for two steps.
    """
    committed_s: dict[int, float] = {}
    ready_s: dict[int, float] = {}
    lost_s: dict[int, float] = {}
    formed: list[tuple[int, int]] = []  # first step, members
    for t, event in log:
        match event:
            case StepsCommitted():
                for step in range(event.first_step, event.last_step):
                    committed_s.setdefault(step, t)
            case MemberReady():
                ready_s[event.member] = t
            case MemberLost():
                lost_s[event.member] = t
            case GenerationFormed():
                formed.append((event.first_step, len(event.members)))
            case _:
                pass
    losses_s = sorted(lost_s.values())
    most = max((members for _, members in formed), default=0)
    end = max(committed_s, default=0) + 1
    alike = [
        committed_s[step] - committed_s[step - 1]
        for (first, members), (until, _) in pairwise([*formed, (end, 0)])
        if members == most
        for step in range(first + 1, until)  # the first one is that of the meeting
        if step in committed_s and step - 1 in committed_s
    ]
    if len(losses_s) < 2 or len(alike) < 2:
        raise ValueError(f"{len(losses_s)} losses and {len(alike)} undisturbed steps say nothing")
    half_s = (losses_s[-1] - losses_s[0]) / (len(losses_s) - 1) / 2
    began_s, ended_s = losses_s[0] - half_s, losses_s[-1] + half_s
    there_s = sum(
        max(0.0, min(lost_s.get(member, ended_s), ended_s) - max(since_s, began_s))
        for member, since_s in ready_s.items()
    )
    return Present(
        losses=len(losses_s),
        steps=sum(began_s < t <= ended_s for t in committed_s.values()),
        undisturbed_s=mean(alike),
        workers=there_s / (ended_s - began_s),
        most=most,
        window_s=ended_s - began_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.present", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    for directory in parser.parse_args(arguments).runs:
        try:
            found = present(read_events(directory / "events.jsonl"))
        except (ValueError, RaycloudError) as error:
            parser.error(f"{directory}: {error}")
        print(
            f"{directory}: {found.goodput:.3f} of what {found.workers:.2f} of {found.most} workers "
            f"could do, {found.losses} losses in {found.window_s:.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
