"""One start of a run: from asking for members to its end, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.control import ControlSettings, Phase
from raycloud.events import DataGrew
from raycloud.run.driver import Driver
from raycloud.simulate.cluster import VirtualCluster
from raycloud.simulate.computing import Computing, Origin
from raycloud.simulate.ending import Ending
from raycloud.simulate.fleet import Fleet
from raycloud.simulate.watched import WatchedControl
from raycloud.simulate.words import Words
from raycloud.spec.sizes import report_s

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.simulate.machines import Machines
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.story import Story
    from raycloud.simulate.world import World

_TURN_S = 1.0
_LACKING_S = 150.0  # so long members may be asked for again before all is thinned out


class Start:
    """The driver, the fleet and their words, from one start of a run to its end.

    While nothing goes on it is thinned out: no word comes and no second ticks until the next
    happening. Just before that, everyone tells how far it is.

    Args:
        scenario: What is simulated.
        world: Whose time and chance.
        machines: Where members find places.
        story: What is known of the run.
        clock: To measure decisions with.

    Attributes:
        room: How many members the machines hold, as the driver knows.
    """

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, story: Story, clock: Clock
    ) -> None:
        """Nobody is asked for yet."""
        self._scenario, self._world = scenario, world
        self.room = machines.room
        kept = story.kept
        origin = Origin.of(kept, story.samples)
        self.words = Words(world, scenario.delay_s)
        self.fleet = Fleet(scenario, world, machines, self.words, story.samples)
        self._samples, self._version = story.samples, 0
        self.computing = Computing(scenario, world, self.fleet, self.words, origin)
        self.computing.useful_s = 0.0 if kept is None else kept.useful_s
        self.ending = Ending(self.computing)
        settings = ControlSettings(
            min_workers=scenario.least,
            max_workers=scenario.members,
            capacity=self.room,
            global_batch=scenario.global_batch,
            micro_batch=scenario.micro_batch,
            drop_last=scenario.drop_last,
            shares="equal" if scenario.shares == "equal" else "auto",
            silence_s=scenario.silence_s,
            saves=scenario.every_steps == "auto",
            step=origin.step,
            position=origin.at,
            ledger=None if kept is None else kept.ledger,
            first_generation=story.next_generation,
            first_member=story.spawned,
        )
        control = WatchedControl(settings, world, self.fleet, story, clock)
        self.cluster = VirtualCluster(control, self.ending, self.computing, story)
        self.driver = Driver(control, self.cluster, self.cluster, lambda: world.clock_s)
        self._awake_until_s = 0.0
        self._dozing = False

    def run(self, until_s: float) -> bool:
        """Let happen what happens, to the end of this start; False where `until_s` comes first."""
        self._stay_awake()
        self.driver.start()
        self.fleet.later(_TURN_S, self._turn)
        self.fleet.later(self._report_s, self._round)
        world, words, driver = self._world, self.words, self.driver
        while driver.finish is None:
            word_s, next_s = words.next_s, world.next_s
            if word_s > until_s and next_s > until_s:
                return False
            if word_s > next_s:
                world.happen()
                continue
            world.now_s = max(word_s, world.now_s)
            self._hear()
        return True

    def _hear(self) -> None:
        """Take in the next word."""
        if (event := self.words.take()) is not None and self.cluster.sees(event):
            self.driver.take(event)

    @property
    def _report_s(self) -> float:
        """Until the next reports."""
        asked_s, group = self._scenario.report_s, self.computing.group
        return report_s(len(group.members) if group else 1) if asked_s is None else asked_s

    def close(self) -> None:
        """Every process ends."""
        self.fleet.over = True
        for number in [*self.fleet.seats, *self.fleet.away, *self.fleet.waiting]:
            self.fleet.drop(number)

    def wake(self) -> None:
        """Something is about to happen: the driver knows how things stood until now."""
        if self._dozing:
            self._dozing = False
            self.computing.round(everyone=True)
            self.words.hurry()
            while self.words.next_s <= self._world.now_s and self.driver.finish is None:
                self._hear()
            self.driver.turn()
            self.fleet.later(_TURN_S, self._turn)
            self.fleet.later(self._report_s, self._round)
        self._stay_awake()

    def grow(self, samples: int) -> None:
        """There is more data, and it has been read."""
        if samples > self._samples:
            self._samples, self._version = samples, self._version + 1
            grew = DataGrew(samples=samples, version=self._version)
            self.words.tell(grew, self._world.now_s)

    def _stay_awake(self) -> None:
        self._awake_until_s = self._world.now_s + self._scenario.awake_s

    def _turn(self) -> None:
        if self._world.now_s < self.words.deaf_until_s:
            self.fleet.later(self.words.deaf_until_s - self._world.now_s, self._turn)
            return
        self.driver.turn()
        if self._world.now_s > self._awake_until_s and self._quiet():
            self._dozing = True
        else:
            self.fleet.later(_TURN_S, self._turn)

    def _round(self) -> None:
        if not self._dozing:
            self.computing.round(everyone=False)
            self.fleet.later(self._report_s, self._round)

    def _quiet(self) -> bool:
        """Nothing goes on but steps."""
        control, group, fleet = self.driver.control, self.computing.group, self.fleet
        if group is None or group.stalled_s is not None or group.newcomers or len(self.words):
            return False
        if control.phase is not Phase.TRAINING or control.change_outstanding is not None:
            return False
        if fleet.building or fleet.away or len(fleet.seats) != len(group.members):
            return False
        lacking = len(group.members) < min(self._scenario.members, self.room)
        if lacking and self._world.now_s < self._awake_until_s + _LACKING_S:
            return False
        return all(body.well for body in fleet.seats.values())
