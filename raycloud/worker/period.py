"""A member's part in choosing how many steps a round has: see `sync.period`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from raycloud.events import Noticed
from raycloud.sync.period import Seen, choose, lost_s, taken

if TYPE_CHECKING:
    from raycloud.net.lane import Lane
    from raycloud.step.rounds import Rounds
    from raycloud.sync.gradients import Exchanged

_STARTING = 2  # exchanges of a generation or period that are not looked at
_FIRST_LOOK_STEPS = 12  # before there is any choice


class Processors(NamedTuple):
    """Processor seconds that this process has used, and of these those that exchanges have."""

    cpu_s: float = 0.0
    courier_s: float = 0.0


class Took(NamedTuple):
    """Seconds of what leads to an exchange, that included, and of these those of passes."""

    wall_s: float
    computing_s: float


class PeriodLooks:
    """Looks, at the same steps as all other members, whether rounds should have another length.

    Args:
        rounds: Whose choice it is; None, or where they do not adapt: there is nothing to look at.
        warm_steps: That are exchanged one by one whatever is chosen.
    """

    def __init__(self, rounds: Rounds | None, warm_steps: int) -> None:
        self._rounds = rounds if rounds is not None and rounds.adapts else None
        self._warm_steps = warm_steps
        self._why, self._detail = "", dict[str, float]()  # of the newest choice
        self.begin(0)

    def begin(self, step: int) -> None:
        """It is another generation, or period, from `step` on."""
        self._seen, self._starting = Seen(), _STARTING
        self._since = self._now = Processors()
        self._computing_s = 0.0
        if self._rounds is not None:
            choice, warm = self._rounds.choice, self._warm_steps
            if choice.number:
                starting = _STARTING * choice.period
                self._due_step = max(step, warm) + starting + choice.look_steps
            else:
                self._due_step = max(step + _FIRST_LOOK_STEPS, warm)

    def see(
        self, steps: int, exchanged: Exchanged, weight: float, took: Took, now: Processors
    ) -> None:
        """An exchange after so many steps, which weigh `weight`, and what it all took."""
        rounds, seen = self._rounds, self._seen
        if rounds is None:
            return
        if self._starting:
            self._starting -= 1
            self._since = now
            return
        self._now = now
        seen.exchanges += 1
        seen.steps += steps
        seen.wall_s += took.wall_s
        seen.exposed_s += exchanged.exchange_s
        seen.hidden_s += exchanged.overlap_s
        self._computing_s += took.computing_s
        if rounds.choice.period > 1 and weight > 0.0:
            part = rounds.weight / weight
            seen.own += part * rounds.given
            seen.alone += part**2 * rounds.given
            seen.mean += exchanged.norm**2

    def look(self, step: int, lane: Lane) -> bool:
        """Choose anew, if that is due after so many steps: whether it is another choice."""
        if self._rounds is None or not self._rounds.adapts or step < self._due_step:
            return False
        cpu_s = self._now.cpu_s - self._since.cpu_s
        courier_s = self._now.courier_s - self._since.courier_s
        self._seen.lost_s = lost_s(self._computing_s, cpu_s, courier_s)
        rows = lane.gather((*self._seen.told(), bool(self._rounds.unaveraged)))
        now = self._rounds.choice
        if any(row[-1] for row in rows):  # rounds would be refused
            now = replace(now, most=1)
        seen = [Seen.of(row[:-1]) for row in rows]
        choice, why = choose(now, seen)
        if choice != self._rounds.choice:
            self._why = why and (self._rounds.unaveraged or why)
            self._detail = {"period": choice.period, "step": step}
            if rows_seen := [one for one in seen if one.exchanges]:
                self._detail["computing_s"] = float(f"{taken(rows_seen).step_s:.3g}")
            self._rounds.take(choice)
            self.begin(step)
            return bool(self._why)
        self._seen, self._computing_s, self._since = Seen(), 0.0, self._now
        self._due_step = step + choice.look_steps
        return False

    def told(self, member: int, generation: int) -> Noticed:
        """The newest choice, for the run's log: the driver predicts by its details."""
        period, step = int(self._detail["period"]), self._detail["step"]
        what = f"rounds of {period} steps" if period > 1 else "an exchange after each step"
        what = f"sync.period auto: {what} from step {step} on: {self._why}"
        return Noticed(what=what, member=member, detail={**self._detail, "generation": generation})
