"""What a run is worth: from what its workers noted and what was done to it, to the row. Pure.

All times are seconds of the machine's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.racing.capacity import Change, first_rate, mean_rate
from benchmarks.racing.commits import Commit, Work, samples_between, work
from benchmarks.racing.pauses import Fault, pauses, relieves

if TYPE_CHECKING:
    from benchmarks.journal import WorkerJournal


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
        trunk_bytes: That crossed trunks between zones, both ways, in the window.
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
    trunk_bytes: int = 0
    losses: Sequence[tuple[int, float]] = ()
    target_loss: float | None = None
    summed: bool = False
    failed: str = ""


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

    - `samples_per_s`: samples of kept updates over the seconds of the whole window, also where the
      contestant ended early: what it did not do, it did not do.
    - `noted_samples_per_s`: the same with what was lost later.
    - `limit_samples_per_s`: what the nodes that were there at the window's start compute without
      exchange, whatever happens to them later.
    - `ratio_to_limit`: `samples_per_s` over `limit_samples_per_s`. Above 1 where nodes come.
    - `present_samples_per_s`: the mean over the window of what the nodes that were there at each
      second could compute, a slowed one in part, a gone or frozen one not at all.
    - `goodput`: kept samples of the window over the integral of what the nodes that were there
      could compute in it, so `samples_per_s` over `present_samples_per_s`. It says what a
      contestant made of what it had; without events it equals `ratio_to_limit`.
    - `wire_bytes`: bytes that all machines, head included, sent in the window per sample kept in
      it; `wire_bytes_total`: the bytes; `trunk_bytes`: of trunks alone, per sample, both ways.
    - `pauses_s`: seconds, one per entry of `faults`, which also hold the reliefs.

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
    "present_samples_per_s",
    "ratio_to_limit",
    "goodput",
    "time_to_target_s",
    "final_loss",
    "final_s",
    "wire_bytes",
    "wire_bytes_total",
    "trunk_bytes",
    "first_step_s",
)


def _in_window(
    seen: Observation, done: Work, window: tuple[float, float], speeds: Mapping[str, float] | None
) -> dict[str, Any]:
    start_s, end_s = window
    window_s = end_s - start_s
    samples = samples_between(done.kept, start_s, end_s)
    limit = None if speeds is None else first_rate(speeds, seen.changes, start_s)
    present = None if speeds is None else mean_rate(speeds, seen.changes, start_s, end_s)
    reliefs = [relieves(fault, seen.changes) for fault in seen.faults]
    held = pauses(done.noted, [fault.t_s for fault in seen.faults], end_s, reliefs)
    return {
        "window_s": window_s,
        "samples_per_s": samples / window_s,
        "noted_samples_per_s": samples_between(done.noted, start_s, end_s) / window_s,
        "limit_samples_per_s": limit,
        "ratio_to_limit": samples / window_s / limit if limit else None,
        "present_samples_per_s": present,
        "goodput": samples / (present * window_s) if present else None,
        "wire_bytes": seen.sent_bytes / samples if samples else None,
        "wire_bytes_total": seen.sent_bytes,
        "trunk_bytes": seen.trunk_bytes / samples if samples else None,
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
