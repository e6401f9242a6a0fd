"""Population-based training: those that do badly go on as others that do well, with other values.

(Jaderberg et al., 2017.) Trials go by generations, of so many steps: all stand at its end before
the next begins, so that which trial goes on does not depend on who was fast. Of each generation the
worst quarter ends, and for each of them a new trial begins from where one of the best quarter
stands, with its values a little changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from raycloud.order.seeds import stream_seed
from raycloud.spec.sweep import is_varied
from raycloud.tuning.results import Fork

if TYPE_CHECKING:
    from raycloud.spec.sweep import Point, Sweep
    from raycloud.tuning.results import Results, Trial

_QUARTER = 4
_ANEW = 0.25  # how often a value is drawn anew, and not changed a little
_TRIES = 100  # to change values so that the job takes them
_SEEDS = 2**63
_DONOR, _VALUES = 0, 1  # streams of what is drawn


class Population:
    """Who computes how far, by what is known of all trials.

    Args:
        sweep: How values vary.
        steps: Of the job.
        generation: Steps of a generation.
        results: All trials, kept elsewhere.
        refuses: Whether the job does not take these values.
    """

    def __init__(
        self,
        sweep: Sweep,
        steps: int,
        generation: int,
        results: Results,
        refuses: Callable[[Point], bool],
    ) -> None:
        self._sweep, self._steps, self._generation = sweep, steps, generation
        self._results, self._refuses = results, refuses

    @property
    def living(self) -> list[Trial]:
        """Trials that no other has taken the place of, and that did not end by themselves."""
        replaced = {trial.fork.replaces for trial in self._results.trials.values() if trial.fork}
        return [
            trial
            for number, trial in sorted(self._results.trials.items())
            if number not in replaced and trial.status in {"running", "finished"}
        ]

    @property
    def at(self) -> int:
        """Where the newest generation has ended, that all have come through; 0: none has."""
        least = min((_at(trial) for trial in self.living), default=0)
        return least // self._generation * self._generation

    @property
    def until(self) -> int:
        """Where the present generation ends: past the trial that is furthest behind."""
        return min(self.at + self._generation, self._steps)

    def next(self, busy: Collection[int]) -> Trial | None:
        """The next to compute, until `until`; None: all of this generation do, or have."""
        until = self.until
        waiting = (t for t in self.living if t.number not in busy and t.status == "running")
        return next((trial for trial in waiting if _at(trial) < until), None)

    def forks(self) -> Iterator[tuple[Fork, Point]]:
        """Who is to begin where, where a generation has just ended; those that are there left out.

        It is the same again, after some of them have been kept.
        """
        living, at = self.living, self.at
        if not 0 < at < self._steps or any(_at(trial) > at for trial in living):
            return
        born = {t.number: t.fork for t in self._results.trials.values() if t.fork}
        new = {number for number, fork in born.items() if fork.step == at}
        gone = {born[number].replaces for number in new}
        alive = {trial.number for trial in living}
        before = [
            trial
            for number, trial in sorted(self._results.trials.items())
            if number not in new and (number in alive | gone or self._died(trial, at))
        ]
        worth = {trial.number: _badness(trial, self._sweep.mode) for trial in before}
        ranked = sorted(before, key=lambda trial: (worth[trial.number], trial.number))
        well = sum(map(math.isfinite, worth.values()))
        few = len(ranked) // _QUARTER or 1
        losers = ranked[min(well, max(1, len(ranked) - few)) :] if well else []
        for loser in losers:
            if loser.number in gone:
                continue
            seed = stream_seed(self._sweep.seed, at, loser.number, _DONOR)
            donor = ranked[seed % min(few, well)]
            yield (
                Fork(parent=donor.number, replaces=loser.number, step=at),
                self._changed(dict(donor.point), at, loser.number),
            )

    def _died(self, trial: Trial, at: int) -> bool:
        """Whether it failed in the generation that ends here, or has not been replaced since."""
        replaced = {t.fork.replaces for t in self._results.trials.values() if t.fork}
        here = trial.fork is None or trial.fork.step < at
        return trial.status == "failed" and trial.number not in replaced and here

    def _changed(self, point: Point, at: int, number: int) -> Point:
        """Values near these, that the job takes; else these."""
        for attempt in range(_TRIES):
            found: Point = {}
            for place, (path, parameter) in enumerate(self._sweep.space.items()):
                if not is_varied(parameter, found):
                    continue
                draw = stream_seed(self._sweep.seed, at, number, _VALUES, attempt, place)
                part = draw / _SEEDS
                if path not in point or part < _ANEW:
                    found[path] = parameter.at(part if path not in point else part / _ANEW)
                else:
                    found[path] = parameter.near(point[path], up=bool(draw % 2))
            if not self._refuses(found):
                return found
        return dict(point)


def _at(trial: Trial) -> int:
    return trial.last.step if trial.last else 0


def _badness(trial: Trial, mode: str) -> float:
    """By which trials are ranked; infinite where it failed, or came to no number."""
    if trial.status == "failed" or trial.last is None or not math.isfinite(trial.last.measure):
        return math.inf
    return -trial.last.measure if mode == "max" else trial.last.measure
