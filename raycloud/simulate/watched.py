"""Control, watched: what it decides is logged, and how long that takes is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.commands import Finish
from raycloud.control import Control
from raycloud.simulate.telling import short

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.commands import Command
    from raycloud.control import ControlSettings
    from raycloud.events import Event, MemberLost
    from raycloud.simulate.fleet import Fleet
    from raycloud.simulate.story import Story
    from raycloud.simulate.world import World

_WELL_S = 10.0  # who was well for so long is well
_SHORT_S = 0.001
_OLD_S = 0.0005


class Stopwatch:
    """Measures one thing after the other.

    To ask for processor seconds takes as long as a short decision. So what takes less than a
    millisecond by the clock is told by the clock, which never says less; of what takes longer the
    processor seconds are told, others being busy here, too: at most 0.5 ms too many.

    Args:
        clock: Whose seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing is measured yet."""
        self._clock = clock
        self._began_s = 0.0
        self._asked_s = float("-inf")  # when processor seconds were asked for,
        self._cpu_s = 0.0  # and what they were

    def begin(self) -> None:
        """From now on."""
        self._began_s = now_s = self._clock.monotonic_s()
        if now_s - self._asked_s > _OLD_S:
            self._asked_s, self._cpu_s = now_s, self._clock.cpu_s()

    def took_s(self) -> float:
        """How long it took since `begin`."""
        took_s = self._clock.monotonic_s() - self._began_s
        if took_s < _SHORT_S:
            return took_s
        self._asked_s = float("-inf")
        return min(took_s, self._clock.cpu_s() - self._cpu_s)


class WatchedControl(Control):
    """The real one.

    Args:
        settings: Its own.
        world: Whose log its commands go to.
        fleet: Says who is well.
        story: What is known of the run: decisions, and what is wrong with them.
        clock: To measure them with.
    """

    def __init__(
        self, settings: ControlSettings, world: World, fleet: Fleet, story: Story, clock: Clock
    ) -> None:
        """Nothing happens before `start`."""
        super().__init__(settings)
        self._world, self._fleet, self._story = world, fleet, story
        self._watch = Stopwatch(clock)
        self._ended = False

    def start(self, now_s: float) -> tuple[Command, ...]:
        """See `Control.start`."""
        return self._log(super().start(now_s))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """See `Control.on`."""
        self._watch.begin()
        commands = super().on(event, now_s)
        self._measure(type(event).__name__)
        return self._log(commands) if commands else commands

    def tick(self, now_s: float) -> tuple[Command, ...]:
        """See `Control.tick`."""
        self._watch.begin()
        commands = super().tick(now_s)
        self._measure("tick")
        self._world.log.count(self._world.now_s)
        return self._log(commands)

    def overdue(self, now_s: float) -> MemberLost | None:
        """See `Control.overdue`; one that is well is mistaken for lost."""
        self._watch.begin()
        lost = super().overdue(now_s)
        self._measure("overdue")
        body = None if lost is None else self._fleet.seats.get(lost.member)
        if body is not None and body.well and body.built:
            self._story.mistaken += self._world.now_s - body.well_since_s > _WELL_S
        return lost

    def _log(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        for command in commands:
            self._world.log.add(f"{self._world.now_s:.6f} > {short(command)}")
            if self._ended:
                self._story.wrong.append(f"a command came after the last one: {short(command)}")
            if isinstance(command, Finish):
                self._ended = True
                if " times in step " in (command.error or ""):
                    what = f"it gave up, though no step ends members: {command.error}"
                    self._story.wrong.append(what)
        return commands

    def _measure(self, kind: str) -> None:
        took_s, story = self._watch.took_s(), self._story
        story.took_s.append(took_s)
        if took_s > story.worst_s:
            story.worst_s = took_s
            story.worst = f"{kind} in {self.phase}"
