"""What a run committed and what of it was kept, from what its workers noted. Pure.

All times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.journal import WorkerJournal


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One update: when the first of its workers had stepped, and the samples of all of them."""

    t_s: float
    update: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run committed, by time.

    Attributes:
        noted: Every update at the moment it was committed, also those that were lost later.
        kept: Those that were not.
    """

    noted: tuple[Commit, ...]
    kept: tuple[Commit, ...]

    @property
    def lost_steps(self) -> int:
        """Updates that a restart took back."""
        return len(self.noted) - len(self.kept)


@dataclass
class _Standing:
    """An update, its samples so far, and which processes have noted it."""

    t_s: float
    update: int
    samples: int
    by: set[tuple[str, int, float]]

    def commit(self) -> Commit:
        return Commit(t_s=self.t_s, update=self.update, samples=self.samples)


def work(journals: Sequence[WorkerJournal], *, summed: bool = False) -> Work:
    """The updates that the workers committed.

    An update's time is the earliest note of it. It is computed again when a process notes it that
    had noted it already, or one that was started only after it was committed: the training went
    back, so it and all that followed it are lost. A process that comes later and takes part from a
    later update on computes nothing again, and a late note of a slow one changes nothing.

    Args:
        journals: Of all workers.
        summed: Whether each notes its own samples of an update, to be summed, rather than those of
            all of them.
    """
    notes = sorted(
        ((note, (j.node, j.pid, j.started_s)) for j in journals for note in j.notes),
        key=lambda pair: (pair[0].t_s, pair[0].update),
    )
    standing: dict[int, _Standing] = {}
    noted: list[_Standing] = []
    for note, process in notes:
        now = standing.get(note.update)
        if now is not None and process not in now.by and process[2] <= now.t_s:
            now.by.add(process)
            now.samples += note.samples if summed else 0
            continue
        if now is not None:
            for update in [update for update in standing if update >= note.update]:
                del standing[update]
        new = _Standing(note.t_s, note.update, note.samples, {process})
        standing[note.update] = new
        noted.append(new)
    kept = sorted(standing.values(), key=lambda one: one.t_s)
    return Work(noted=tuple(o.commit() for o in noted), kept=tuple(o.commit() for o in kept))


def samples_between(commits: Sequence[Commit], start_s: float, end_s: float) -> float:
    """Samples of the commits in [start_s, end_s].

    An update's samples are spread evenly over the time since the commit before it, so a step that
    an end of the window cuts counts by the fraction of its time that lies inside. Nothing is known
    of the time before the first commit: its samples count as a whole at its own second.

    >>> steps = [Commit(t_s=t, update=t, samples=8) for t in (1, 3, 5)]
    >>> samples_between(steps, 2.0, 4.0)  # half of the second, half of the third
    8.0
    """
    total = 0.0
    for i, commit in enumerate(commits):
        since_s = commits[i - 1].t_s if i else commit.t_s
        took_s = commit.t_s - since_s
        if took_s <= 0:
            total += commit.samples if start_s <= commit.t_s <= end_s else 0
            continue
        inside_s = min(commit.t_s, end_s) - max(since_s, start_s)
        total += commit.samples * max(0.0, inside_s) / took_s
    return total
