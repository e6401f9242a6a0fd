"""What a run is worth: from what its workers noted and what was done to it, to the row. Pure.

All times are seconds of the machine's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.racing.capacity import Change, mean_rate

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


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that was done to the nodes.

    Attributes:
        t_s: When it was done.
        what: In words, such as "kill-process n1".
    """

    t_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Pause:
    """How long a fault held the training up; None, and why, where it never went on."""

    pause_s: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that was seen of a run.

    Attributes:
        t0_s: When the contestant was started.
        window: First and last second of the window; None where it never got that far.
        journals: What its workers noted.
        faults: What was done in the window, by time.
        changes: From when on which node had how much of its speed, by time.
        sent_bytes: By all machines, head included, in the window.
        losses: (update, held-out loss) of its snapshots.
        target_loss: Held-out loss to reach; None where there is none.
        summed: Whether each worker notes its own samples of an update.
        failed: Why it ended early; empty where it did not.
    """

    t0_s: float
    window: tuple[float, float] | None = None
    journals: Sequence[WorkerJournal] = ()
    faults: Sequence[Fault] = ()
    changes: Sequence[Change] = ()
    sent_bytes: int = 0
    losses: Sequence[tuple[int, float]] = ()
    target_loss: float | None = None
    summed: bool = False
    failed: str = ""


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


def pauses(noted: Sequence[Commit], faults_s: Sequence[float], end_s: float) -> tuple[Pause, ...]:
    """One pause per fault.

    It is the longest gap between two commits that ends after the fault and begins before the next
    one (the last one's: before `end_s`), minus the median step at the new capacity: the steps that
    lie between that gap and the next fault, or, where there is none, all steps after the gap, or
    else all steps. Never below 0. Commits that were lost later count here: they are another
    measure. A gap in which two faults fell is both faults' pause, and one during which no node was
    there holds that time too.

    Args:
        noted: All commits, by time.
        faults_s: When the faults happened, by time.
        end_s: End of the window.
    """
    gaps = [(a.t_s, b.t_s) for a, b in pairwise(noted)]
    found = []
    for i, fault_s in enumerate(faults_s):
        before_s = faults_s[i + 1] if i + 1 < len(faults_s) else end_s
        hit = [gap for gap in gaps if gap[1] > fault_s and gap[0] < before_s]
        if not hit:
            why = "no update was committed after it" if noted else "nothing was committed"
            found.append(Pause(pause_s=None, reason=why))
            continue
        longest = max(hit, key=lambda gap: gap[1] - gap[0])
        step_s = _normal_step_s(gaps, longest, before_s)
        found.append(Pause(pause_s=max(0.0, longest[1] - longest[0] - step_s)))
    return tuple(found)


def _normal_step_s(
    gaps: Sequence[tuple[float, float]], longest: tuple[float, float], before_s: float
) -> float:
    after = [gap for gap in gaps if gap[0] >= longest[1]]
    settled = [gap for gap in after if gap[1] <= before_s]
    return median(b - a for a, b in (settled or after or gaps))


def time_to_target_s(
    kept: Sequence[Commit], losses: Sequence[tuple[int, float]], target: float, t0_s: float
) -> float | None:
    """Seconds from `t0_s` until the held-out loss was `target`; None where it never was.

    The first snapshot at or below the target and the one before it are joined by a straight line;
    a first snapshot that is below it already counts with its own second.
    """
    when_s = {commit.update: commit.t_s for commit in kept}
    points = [(when_s[update], loss) for update, loss in sorted(losses) if update in when_s]
    for i, (t_s, loss) in enumerate(points):
        if loss > target:
            continue
        if i == 0:
            return t_s - t0_s
        earlier_s, higher = points[i - 1]
        return earlier_s + (t_s - earlier_s) * (higher - target) / (higher - loss) - t0_s
    return None


def node_rates(
    journals: Sequence[WorkerJournal], start_s: float, end_s: float
) -> Mapping[str, float]:
    """Samples per second of every node where each process trains for itself: the limit."""
    rates: dict[str, float] = {}
    for journal in journals:
        rate = samples_between(work([journal]).kept, start_s, end_s) / (end_s - start_s)
        rates[journal.node] = rates.get(journal.node, 0.0) + rate
    return rates


def row(seen: Observation, speeds: Mapping[str, float] | None) -> dict[str, Any]:
    """The measures of a run; None where there was nothing to measure.

    `samples_per_s` counts kept updates over the whole window, also where the contestant ended
    early: what it did not do, it did not do. `limit_samples_per_s` is the mean over the window of
    what the nodes that were there could compute, and `ratio_to_limit` is the ratio of the two.
    `goodput` is the same work over the integral of the limit. `noted_samples_per_s` also counts
    what was lost later.

    Args:
        seen: The run.
        speeds: Samples per second of each node alone, in the same repeat; None: not measured.
    """
    done = work(seen.journals, summed=seen.summed)
    found: dict[str, Any] = dict.fromkeys(_MEASURES)
    found |= {"failed": seen.failed or None, "updates": len(done.kept), "window_s": None}
    found |= {"lost_steps": done.lost_steps if done.noted else None}
    found |= {"pauses_s": [], "faults": []}
    if done.noted:
        found["first_step_s"] = done.noted[0].t_s - seen.t0_s
    if seen.window is not None:
        found |= _in_window(seen, done, seen.window, speeds)
    found |= _losses(seen, done)
    return found


_MEASURES = (
    "samples_per_s",
    "noted_samples_per_s",
    "limit_samples_per_s",
    "ratio_to_limit",
    "goodput",
    "time_to_target_s",
    "final_loss",
    "final_s",
    "wire_bytes",
    "wire_bytes_total",
    "first_step_s",
)


def _in_window(
    seen: Observation, done: Work, window: tuple[float, float], speeds: Mapping[str, float] | None
) -> dict[str, Any]:
    start_s, end_s = window
    window_s = end_s - start_s
    samples = samples_between(done.kept, start_s, end_s)
    limit = None if speeds is None else mean_rate(speeds, seen.changes, start_s, end_s)
    held = pauses(done.noted, [fault.t_s for fault in seen.faults], end_s)
    return {
        "window_s": window_s,
        "samples_per_s": samples / window_s,
        "noted_samples_per_s": samples_between(done.noted, start_s, end_s) / window_s,
        "limit_samples_per_s": limit,
        "ratio_to_limit": samples / window_s / limit if limit else None,
        "goodput": samples / (limit * window_s) if limit else None,
        "wire_bytes": seen.sent_bytes / samples if samples else None,
        "wire_bytes_total": seen.sent_bytes,
        "pauses_s": [one.pause_s for one in held],
        "faults": [
            {
                "at_s": round(fault.t_s - start_s, 3),
                "what": fault.what,
                "no_pause_because": one.reason or None,
            }
            for fault, one in zip(seen.faults, held, strict=True)
        ],
    }


def _losses(seen: Observation, done: Work) -> dict[str, Any]:
    when_s = {commit.update: commit.t_s for commit in done.kept}
    known = [(update, loss) for update, loss in sorted(seen.losses) if update in when_s]
    if not known:
        return {}
    reached = (
        None
        if seen.target_loss is None
        else time_to_target_s(done.kept, known, seen.target_loss, seen.t0_s)
    )
    update, loss = known[-1]
    return {
        "time_to_target_s": reached,
        "final_loss": loss,
        "final_s": when_s[update] - seen.t0_s,
    }
