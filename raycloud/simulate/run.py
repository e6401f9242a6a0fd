"""A whole run: started, and started again from its newest checkpoint, until it has ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from raycloud.clock import Clock, SystemClock
from raycloud.errors import RaycloudError
from raycloud.order import EpochSizes, read_ledger
from raycloud.simulate.cluster import Start
from raycloud.simulate.faults import Faults
from raycloud.simulate.history import NOTHING, History, Outcome
from raycloud.simulate.lockstep import undisturbed
from raycloud.simulate.machines import Machines
from raycloud.simulate.world import World

if TYPE_CHECKING:
    from raycloud.simulate.scenario import Scenario

_RESTART_S = (2.0, 30.0)
_PATIENCE_S = 5_000.0  # once all is well, beside the seconds of the steps
_SLOWEST = 6.0  # a slow node, once all is well, is slow no more; shares follow
_SHOWN = 5  # broken promises


class _Run:
    """One scenario, from its beginning to its end."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.scenario, self.clock = scenario, clock
        self.world = World(scenario.seed)
        self.machines = Machines(scenario)
        self.machines.now_s = lambda: self.world.now_s
        self.story = History(scenario.samples)
        self.befalling = Faults(scenario, self.world, self.machines, self.story)
        for at_s in scenario.marks_s:
            self.world.at(at_s, self._mark)
        self.starts = 0
        self.pauses_s: list[float] = []
        self.until_s = scenario.lasts_s + _PATIENCE_S + self._work_s()
        self.stopped_s: float | None = None  # the start before ended then

    def _mark(self) -> None:
        """Note how many steps there are."""
        start = self.befalling.start
        if start is None:
            steps = float((self.story.kept or NOTHING).step)
        elif (group := start.computing.group) is None:
            steps = float(start.computing.reached)
        else:
            group.advance(self.world.now_s)
            part = (self.world.now_s - group.begun_s) / group.step_s
            steps = group.step + min(max(part, 0.0), 1.0)
        self.story.marks.append(steps)

    def _work_s(self) -> float:
        """How long all steps take the fewest members."""
        scenario = self.scenario
        share = -(-scenario.micro_batches // scenario.least)
        seconds = (speed.seconds(share) for speed in self.machines.speeds)
        step_s = max(seconds) * _SLOWEST + scenario.exchange_s
        return step_s * (scenario.steps or 10)

    def go(self) -> Outcome:
        """To its end."""
        status = "broken"
        while not self.story.wrong and self.world.now_s <= self.until_s:
            if self.scenario.steps is None and self.befalling.calm and self.starts:
                status = "stopped"
                break
            if not self._place():
                continue
            status = self._start()
            if status == "finished":
                break
        if self.world.now_s > self.until_s:
            self.story.wrong.append("the run does not end, though all is well again")
        self._check_values()
        return self._outcome("broken" if self.story.wrong else status)

    def _place(self) -> bool:
        """Wait until there is a place for as many as a start needs."""
        scenario = self.scenario
        needed = max(scenario.least, min(scenario.members, self.machines.room))
        if self.machines.open >= needed:
            return True
        if self.world.next_s == float("inf"):
            self.story.wrong.append("nothing happens any more, and there is no place to start")
            return True
        self.world.happen()
        return False

    def _start(self) -> str:
        """One start; how it ended."""
        self.starts += 1
        world, story = self.world, self.story
        world.log.add(f"{world.now_s:.6f} ! start {self.starts}")
        start = Start(self.scenario, world, self.machines, story, self.clock)
        start.computing.full = self.befalling.full
        start.computing.stopped_s = self.stopped_s
        self.befalling.start = start
        try:
            ended = start.run(self.until_s)
        except (RaycloudError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            story.wrong.append(f"{type(error).__name__}: {error}")
            ended = True
        if not ended:
            phase = start.driver.control.phase
            story.wrong.append(f"stuck in {phase}: the run does not end, though all is well again")
        self.befalling.start = None
        self._check(start)
        start.close()
        self.pauses_s += start.computing.pauses_s
        self.stopped_s = start.computing.stopped_s
        if self.stopped_s is None and start.computing.reached > start.computing.origin.step:
            self.stopped_s = world.now_s
        finish = start.driver.finish
        if finish is None or finish.status == "finished":
            return "finished" if finish is not None else "broken"
        restart_s = world.now_s + world.between(*_RESTART_S)
        while world.next_s <= restart_s:
            world.happen()
        world.now_s = restart_s
        return finish.status

    def _check(self, start: Start) -> None:
        """What a start has left behind is whole."""
        story, control = self.story, start.driver.control
        if start.computing.wrong:
            story.wrong.append(start.computing.wrong)
        if control.ledger is None or story.wrong:
            return
        ledger = read_ledger(story.lines)
        step = control.committed_step
        audit = ledger.audit(through=control.position_at(step))
        if ledger.state() != control.ledger.state() or ledger.next_step != step:
            story.wrong.append(f"the ledger's file has {ledger.next_step} steps, {step} count")
        if not audit.exact:
            story.wrong.append(f"the ledger is not exact: {audit}")
        finish = start.driver.finish
        if finish is not None and finish.status == "finished":
            if ledger.sizes != start.computing.cut.sizes:
                story.wrong.append(f"{ledger.sizes} count, members have {start.computing.cut}")
            saved = (story.kept or NOTHING).step
            if not step == saved == self.scenario.steps:
                what = f"with {step} steps and a checkpoint of step {saved}"
                story.wrong.append(f"finished {what}, {self.scenario.steps} were asked for")

    def _check_values(self) -> None:
        """Every checkpoint has the parameters of an undisturbed run."""
        scenario, values = self.scenario, self.story.values
        kept = self.story.kept
        sizes = EpochSizes.from_state(kept.ledger) if kept else EpochSizes(scenario.samples)
        batch, drop_last = scenario.global_batch, scenario.drop_last
        due = undisturbed(sorted(values), sizes=sizes, global_batch=batch, drop_last=drop_last)
        for step in sorted(values):
            if values[step] != due[step][0]:
                self.story.wrong.append(f"the parameters after {step} steps are others than due")
        if kept is not None:
            counted = sum(
                (stop - start) * ranges["epochs"]
                for ranges in kept.ledger["ranges"]
                for start, stop in ranges["committed"]
            )
            if counted != due[kept.step][1]:
                what = f"{counted} samples after {kept.step} steps"
                self.story.wrong.append(f"the ledger counts {what}, {due[kept.step][1]} are due")

    def _outcome(self, status: str) -> Outcome:
        story, world = self.story, self.world
        kept = story.kept or NOTHING
        took_s = np.array(story.took_s)
        same = ("generations", "recoveries", "returned", "mistaken", "worst_s", "worst")
        return Outcome(
            **{name: getattr(story, name) for name in same},
            status=status,
            members=story.spawned,
            steps=kept.step,
            virtual_s=world.now_s,
            faults=dict(self.befalling.counts),
            starts=self.starts,
            pauses_s=tuple(self.pauses_s),
            goodput=kept.useful_s / max(world.now_s, 1e-9),
            busy_s=kept.busy_s,
            marks=tuple(story.marks),
            node_s=tuple(self.machines.held_s()),
            digest=world.log.digest(),
            lines=world.log.lines,
            tail=tuple(world.log.tail),
            broken=tuple(story.wrong[:_SHOWN]),
            decisions=len(story.took_s),
            usual_s=float(np.quantile(took_s, 0.999)) if len(took_s) else 0.0,
        )


def simulate(scenario: Scenario, clock: Clock | None = None) -> Outcome:
    """Carry a scenario out: the same scenario gives the same log and the same outcome.

    Args:
        scenario: What happens.
        clock: To measure with how long control's decisions really take; by default this machine's.
    """
    with _no_collector():
        return _Run(scenario, SystemClock() if clock is None else clock).go()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Hardly anything here refers to itself, and to look for it takes a sixth of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
