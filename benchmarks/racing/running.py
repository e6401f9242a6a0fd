"""One contestant in one scenario, from its start to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from benchmarks import journal
from benchmarks.racing.capacity import Change
from benchmarks.racing.commits import Commit, Work, work
from benchmarks.racing.contestant import Attempt, Contestant, environment
from benchmarks.racing.meters import Meters, Used
from benchmarks.racing.pauses import Fault
from benchmarks.racing.results import LIMIT
from benchmarks.racing.scenarios import Scenario, Settings, in_words
from benchmarks.testbed import (
    LateError,
    MachineError,
    QuotaError,
    SpecError,
    Testbed,
    ToolError,
)
from benchmarks.testbed.cluster import Cluster, ClusterError
from benchmarks.testbed.events import ScheduleError
from benchmarks.testbed.faults import Outcome, apply_all
from benchmarks.testbed.schedule import Schedule

if TYPE_CHECKING:
    from benchmarks.testbed import Process
    from benchmarks.testbed.events import Event

_POLL_S = 0.1
_LAST_LINES = 3  # the very last is often only a hint
_LOOK_S = 0.5  # between two looks at the journals, which takes time from the nodes
_PATIENCE = 1.5  # times the longest gap between two updates so far
ROUNDS = frozenset({"torchft-diloco", "hivemind"})  # whose updates are rounds of steps
BROKEN = (  # what a testbed raises where it, and no contestant, is at fault
    ClusterError,
    LateError,
    MachineError,
    OSError,
    QuotaError,
    ScheduleError,
    SpecError,
    ToolError,
    ValueError,
)


class EndedError(Exception):
    """The contestant ended, or did not get there in time; says why."""


@dataclass(kw_only=True)
class Race:
    """One run while it lasts, and what was seen of it."""

    bed: Testbed
    contestant: Contestant
    scenario: Scenario
    attempt: Attempt
    settings: Settings
    cluster: Cluster | None = None
    t0_s: float = 0.0
    window: tuple[float, float] | None = None
    processes: list[Process] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    not_done: list[str] = field(default_factory=list)
    used: Used | None = None

    def start(self) -> None:
        """Let the nodes join Ray where they are to, set their quotas, and start the contestant."""
        if self.contestant.on_ray or self.contestant.name == LIMIT:
            self.cluster = Cluster(
                self.bed, directory=self.attempt.logs, environment=environment(self.attempt)
            )
            self.cluster.start()
            self.cluster.join(*self.bed.nodes)
            self.attempt = dataclasses.replace(self.attempt, ray_address=self.cluster.address)
        self.bed.limit()
        self.t0_s = time.monotonic()
        self.processes += self.contestant.start(self.bed, self.attempt)

    def close(self) -> None:
        """End Ray, where there is one; all else ends with the testbed."""
        if self.cluster is not None:
            self.cluster.close()

    def warm_up(self) -> None:
        """Until all nodes take part, and then enough updates are committed and enough time passed.

        Raises:
            EndedError: It does not come to that.
        """
        settings = self.settings
        over_s = self.t0_s + self.scenario.limit_s
        until_s = min(over_s, self.t0_s + settings.first_update_limit_s)
        self.wait(lambda: bool(self.work().noted), until_s, "no update")
        until_s = min(over_s, self.work().noted[0].t_s + settings.first_update_limit_s)
        everyone = set(self.attempt.nodes)
        self.wait(lambda: self.begun() >= everyone, until_s, "not every node took part")
        journals = journal.read(self.attempt.journals)
        firsts_s = [
            min(j.notes[0].t_s for j in journals if j.notes and j.node == node) for node in everyone
        ]
        all_s = max(firsts_s)
        updates = settings.warm_up_updates
        if self.contestant.name in ROUNDS:
            updates = settings.warm_up_rounds

        def warm() -> bool:
            since = sum(commit.t_s >= all_s for commit in self.work().noted)
            return since >= updates and time.monotonic() - all_s >= settings.warm_up_s

        self.wait(warm, over_s, "not warmed up")

    def measure(self) -> None:
        """The window with its events; a contestant that ends in it did nothing in the rest of it.

        Raises:
            EndedError: It has ended.
        """
        schedule = Schedule(self.scenario.events)
        meters = Meters(self.bed)
        start_s = time.monotonic()
        end_s = start_s + self.scenario.window_s
        self.window = start_s, end_s
        self.changes += [Change(t_s=start_s, node=name, part=1.0) for name in self.bed.nodes]
        try:
            while True:
                now_s = min(end_s, time.monotonic())
                self.happen(schedule.due(now_s - start_s))  # late if one before took its time
                meters.see()
                self.check_running(now_s)
                if now_s == end_s:
                    break
                time.sleep(min(_POLL_S, max(0.0, end_s - time.monotonic())))
        except EndedError:
            for event in schedule.due(self.scenario.window_s):  # the limit goes on without it
                self._change(event, start_s + event.at_s)
            raise
        except BROKEN:  # no contestant can be blamed for the rest of it
            self.window = start_s, time.monotonic()
            raise
        finally:
            self.used = meters.read()
        self._last_step(end_s)

    def happen(self, events: Sequence[Event]) -> None:
        """Make events happen, and note what happened."""
        for at_s, some in groupby(events, lambda event: event.at_s):
            began_s = time.monotonic()
            outcomes = self._apply(list(some))
            done = [outcome.event for outcome in outcomes if outcome.happened]
            self.not_done += [
                f"{at_s:g} s {in_words(o.event)}: {o.detail}" for o in outcomes if not o.happened
            ]
            if done:
                self.faults.append(Fault(t_s=began_s, what=", ".join(map(in_words, done))))
            for event in done:
                self._change(event, began_s)
                if event.action == "add":
                    self.processes += self.contestant.joined(self.bed, self.attempt, event.node)

    def until_target(self, losses: Callable[[], Sequence[tuple[int, float]]]) -> None:
        """Go on until the target is reached or the time is over.

        Args:
            losses: The (update, loss) of the snapshots evaluated so far.

        Raises:
            EndedError: The contestant ended before.
            EvaluationError: The losses are not known.
        """
        target, end_s = self.settings.target_loss, self.t0_s + self.scenario.limit_s
        while target is not None and time.monotonic() < end_s:
            kept = {commit.update for commit in self.work().kept}
            if any(loss <= target and update in kept for update, loss in losses()):
                return
            self.check_running(time.monotonic())
            time.sleep(_LOOK_S)

    def wait(self, what: Callable[[], bool], until_s: float, otherwise: str) -> None:
        """Poll until something is so.

        Raises:
            EndedError: The contestant ended, or it is `until_s`.
        """
        while not what():
            now_s = time.monotonic()
            self.check_running(now_s)
            if now_s > until_s:
                limit_s = until_s - self.t0_s
                raise EndedError(f"{otherwise} within {limit_s:.0f} s; {self._last_words()}")
            time.sleep(_LOOK_S)

    def pass_time(self, seconds: float) -> float:
        """Let time pass; returns when it had passed.

        Raises:
            EndedError: The contestant ended.
        """
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            self.check_running(now_s)
            time.sleep(min(_POLL_S, end_s - now_s))
        return time.monotonic()

    def begun(self, since_s: float = 0.0) -> set[str]:
        """Nodes on which an update has been noted after `since_s`."""
        journals = journal.read(self.attempt.journals)
        return {found.node for found in journals if found.notes and found.notes[-1].t_s > since_s}

    def check_running(self, now_s: float) -> None:
        """Check that a process is left, or that nodes are to come on which one will be.

        Raises:
            EndedError: Neither is so.
        """
        if any(process.poll() is None for process in self.processes):
            return
        start_s = self.window[0] if self.window else now_s
        if any(e.action == "add" and start_s + e.at_s >= now_s for e in self.scenario.events):
            return
        statuses = ", ".join(str(process.poll()) for process in self.processes)
        raise EndedError(f"ended with status {statuses}; {self._last_words()}")

    def work(self) -> Work:
        """What is committed so far."""
        return work(journal.read(self.attempt.journals))

    def _apply(self, events: Sequence[Event]) -> list[Outcome]:
        workers = [event for event in events if event.action == "kill-process"]
        others = [event for event in events if event.action != "kill-process"]
        found = [self._kill_worker(event) for event in workers]
        return [*found, *apply_all(others, self.bed, cluster=self.cluster)]

    def _kill_worker(self, event: Event) -> Outcome:
        """SIGKILL to the worker of a node that has begun a journal last."""
        node = event.node
        mine = [found for found in journal.read(self.attempt.journals) if found.node == node]
        for worker in sorted(mine, key=lambda found: found.started_s, reverse=True):
            with contextlib.suppress(MachineError, KeyError):
                self.bed[node].signal(worker.pid, signal.SIGKILL)
                return Outcome(event=event, happened=True, detail=f"{node}: killed {worker.pid}")
        return Outcome(event=event, happened=False, detail=f"{node}: no worker is there")

    def _change(self, event: Event, t_s: float) -> None:
        """Note what an event does to the speed of its node."""
        match event.action:
            case "kill-node" | "freeze":
                part = 0.0
            case "add" | "thaw":
                part = 1.0
            case "throttle":
                specs = {spec.name: spec for spec in self.scenario.everyone.nodes}
                own = specs[event.node].cores
                part = event.cores / own if event.cores and own else 1.0
            case _:
                return
        self.changes.append(Change(t_s=t_s, node=event.node, part=part))

    def _last_step(self, end_s: float) -> None:
        """Until an update is committed after the window, or it has long been time for one."""
        least_s, most_s = self.settings.last_step_s, self.settings.last_round_s
        until_s = end_s + patience_s(self.work().noted, least_s=least_s, most_s=most_s)
        while time.monotonic() < until_s:
            noted = self.work().noted
            if noted and noted[-1].t_s > end_s:
                return
            self.check_running(time.monotonic())
            time.sleep(_LOOK_S)

    def _last_words(self) -> str:
        """The last lines that a contestant said, the unluckiest process first."""
        ordered = sorted(self.processes, key=lambda process: not process.poll())
        for path in dict.fromkeys(process.log for process in ordered):
            lines = path.read_text(errors="replace").split("\n") if path.exists() else []
            said = [line.strip() for line in lines if line.strip()]
            if said:
                return " / ".join(said[-_LAST_LINES:])
        return "it said nothing"


def patience_s(noted: Sequence[Commit], *, least_s: float, most_s: float) -> float:
    """How long to wait for the next update: half as long again as the longest gap so far.

    >>> rounds = [Commit(t_s=t, update=n, samples=640) for n, t in enumerate((0.0, 30.0, 70.0))]
    >>> patience_s(rounds, least_s=15.0, most_s=120.0)
    60.0

    Args:
        noted: All commits, by time.
        least_s: Seconds, where the gaps are short.
        most_s: Seconds, where one is very long.
    """
    longest_s = max((b.t_s - a.t_s for a, b in pairwise(noted)), default=0.0)
    return min(most_s, max(least_s, _PATIENCE * longest_s))
