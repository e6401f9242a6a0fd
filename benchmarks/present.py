"""What workers that are lost, replaced and added cost those that are there, from a run's log.

    python -m benchmarks.present RUN_DIRECTORY [...]

**Of what they could do** is what the run itself does while nothing happens, with as many as are
there: a worker is there from when it is ready until it is lost. So what is left out is what
computing together costs at all, and how long a replacement takes to start; what counts are broken
steps, the meetings, shares that do not fit, and newcomers that are ready and do not compute yet.
The window is as long before the first loss and after the last one as half of the time between two,
and ends with the log. Who leaves by notice is not meant.

**An arrival** costs the others by how much the step in which one joins is longer than the steps
before it, without the newcomer. One in which somebody is lost as well is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from raycloud.errors import RaycloudError
from raycloud.events import Event, GenerationFormed, MemberLost, MemberReady, StepsCommitted
from raycloud.report.log import read_events

_BEFORE = 4  # steps


@dataclass(kw_only=True)
class Story:
    """What of a log is asked for here.

    Attributes:
        committed_s: When a step was committed, as its first report has it: several steps of one
            report are taken to have been equally long.
        ready_s: By member, when it was ready.
        lost_s: By member that had been ready, when it was lost.
        formed: First step of each generation, and who has a share in it.
    """

    committed_s: dict[int, float] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    lost_s: dict[int, float] = field(default_factory=dict)
    formed: list[tuple[int, frozenset[int]]] = field(default_factory=list)

    def step_s(self, step: int) -> float | None:
        """How long after the one before it a step was committed; None where that is not known."""
        if step not in self.committed_s or step - 1 not in self.committed_s:
            return None
        return self.committed_s[step] - self.committed_s[step - 1]

    def steps_s(self, steps: Iterable[int]) -> list[float]:
        """The same of those of which it is."""
        return [s for step in steps if (s := self.step_s(step)) is not None]


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
    def done(self) -> float:
        """Steps that were done, over those that who was there could have done."""
        return self.steps * self.undisturbed_s / (self.window_s * self.workers / self.most)


def read(log: Iterable[tuple[float, Event]]) -> Story:
    """Pick it out of a log: events, with their seconds."""
    story = Story()
    for t, event in log:
        match event:
            case StepsCommitted():
                for step in range(event.first_step, event.last_step):
                    part = (event.last_step - 1 - step) / (event.last_step - event.first_step)
                    story.committed_s.setdefault(step, t - part * event.wall_s)
            case MemberReady():
                story.ready_s[event.member] = t
            case MemberLost():
                if event.member in story.ready_s:
                    story.lost_s[event.member] = t
            case GenerationFormed():
                dealt = zip(event.members, event.shares, strict=True)
                computing = frozenset(member for member, share in dealt if share)
                story.formed.append((event.first_step, computing))
            case _:
                pass
    return story


def present(story: Story) -> Present:
    """How much of what its workers could do was done.

    Raises:
        ValueError: Fewer than two workers were lost, or all were never there for two steps.
    """
    losses_s = sorted(story.lost_s.values())
    most = max((len(members) for _, members in story.formed), default=0)
    end = max(story.committed_s, default=0) + 1
    alike = [
        seconds
        for (first, members), (until, _) in pairwise([*story.formed, (end, frozenset())])
        if len(members) == most
        for seconds in story.steps_s(range(first + 1, until))  # the first is that of the meeting
    ]
    if len(losses_s) < 2 or len(alike) < 2:
        raise ValueError(f"{len(losses_s)} losses and {len(alike)} undisturbed steps say nothing")
    half_s = (losses_s[-1] - losses_s[0]) / (len(losses_s) - 1) / 2
    last_s = max(story.committed_s.values())
    began_s, ended_s = losses_s[0] - half_s, min(losses_s[-1] + half_s, last_s)
    there_s = sum(
        max(0.0, min(story.lost_s.get(member, ended_s), ended_s) - max(since_s, began_s))
        for member, since_s in story.ready_s.items()
    )
    return Present(
        losses=len(losses_s),
        steps=sum(began_s < t <= ended_s for t in story.committed_s.values()),
        undisturbed_s=mean(alike),
        workers=there_s / (ended_s - began_s),
        most=most,
        window_s=ended_s - began_s,
    )


def arrivals_s(story: Story) -> Iterator[float]:
    """By how much each step in which somebody joined was longer than those before; never below 0.

    Where several join one right after the other, there are no steps before the later ones.
    """
    for (began, before), (first, members) in pairwise(story.formed):
        took_s = story.step_s(first)
        usual_s = story.steps_s(range(max(began + 1, first - _BEFORE), first))
        if took_s is None or not usual_s or not members > before:
            continue
        ended_s = story.committed_s[first]
        if not any(ended_s - took_s <= t <= ended_s for t in story.lost_s.values()):
            yield max(0.0, took_s - median(usual_s))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print some lines for each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.present", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    for directory in parser.parse_args(arguments).runs:
        try:
            story = read(read_events(directory / "events.jsonl"))
        except RaycloudError as error:
            parser.error(str(error))
        print(directory)
        print(f"  {_told(story)}")
        if cost_s := ", ".join(f"{seconds:.2f}" for seconds in arrivals_s(story)):
            print(f"  arrivals cost the others {cost_s} s")
    return 0


def _told(story: Story) -> str:
    try:
        found = present(story)
    except ValueError as error:
        return f"of what its workers could do nothing is told: {error}"
    return (
        f"{found.done:.3f} of what {found.workers:.2f} of {found.most} workers could do, "
        f"{found.losses} losses in {found.window_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
