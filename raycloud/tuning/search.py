"""Where to look next: points of a space, drawn, gone through, or proposed by Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from raycloud.errors import JobError
from raycloud.order.seeds import stream_seed
from raycloud.spec.sweep import Point, is_varied, points

if TYPE_CHECKING:
    from raycloud.spec.sweep import Parameter, Sweep


_SEEDS = 2**63  # how many there are


class Search(Protocol):
    """Proposes points, and hears what came of them. Not thread-safe."""

    def ask(self) -> tuple[Any, Point] | None:
        """A key and a point; None: there are no more."""
        ...

    def tell(self, key: Any, values: Sequence[float] | None) -> None:
        """What came of the point of this key: its objectives, less is better; None: it failed."""
        ...

    def remember(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """What came of a point before this search began."""
        ...


def search(sweep: Sweep) -> Search:
    """The one that is asked for.

    Raises:
        JobError: Optuna is not installed.
    """
    if sweep.searcher == "grid":
        return Grid(sweep.space)
    if sweep.searcher in {"random", "pbt"}:
        return Random(sweep.space, sweep.seed)
    return Optuna(sweep)


class Random:
    """Points drawn evenly, none of them twice; where all have been drawn, that is all."""

    _TRIES = 1000

    def __init__(self, space: Mapping[str, Parameter], seed: int) -> None:
        self._space, self._seed, self._drawn = space, seed, 0
        self._seen: list[Mapping[str, Any]] = []

    def ask(self) -> tuple[Any, Point] | None:
        """See `Search.ask`."""
        for _ in range(self._TRIES):
            point = self._draw()
            if point not in self._seen:
                self._seen.append(point)
                return len(self._seen), point
        return None

    def _draw(self) -> Point:
        self._drawn += 1
        point: Point = {}
        for number, (path, parameter) in enumerate(self._space.items()):
            if is_varied(parameter, point):
                drawn = stream_seed(self._seed, self._drawn, number)
                point[path] = parameter.at(drawn / _SEEDS)
        return point

    def tell(self, key: Any, values: Sequence[float] | None) -> None:
        """See `Search.tell`."""

    def remember(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:  # noqa: ARG002 - that it was there is all
        """See `Search.remember`."""
        self._seen.append(point)


class Grid:
    """All points in turn."""

    def __init__(self, space: Mapping[str, Parameter]) -> None:
        self._left = list(points(space))

    def ask(self) -> tuple[Any, Point] | None:
        """See `Search.ask`."""
        return (len(self._left), self._left.pop(0)) if self._left else None

    def tell(self, key: Any, values: Sequence[float] | None) -> None:
        """See `Search.tell`."""

    def remember(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:  # noqa: ARG002 - that it was there is all
        """See `Search.remember`."""
        self._left = [one for one in self._left if one != point]


class Optuna:
    """Points proposed by one of Optuna's samplers, which knows conditions by being asked."""

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna  # noqa: PLC0415 - only some sweeps need it
        except ImportError:
            raise JobError(
                f"sweep.searcher: {sweep.searcher} needs Optuna, which is not installed",
                hint="pip install 'raycloud[sweep]', or write `searcher: random`",
            ) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        many = [optuna.study.StudyDirection.MINIMIZE] * len(sweep.minimize)
        self._sweep, self._space, self._optuna = sweep, sweep.space, optuna
        self._study, self._known = optuna.create_study(directions=many), 0
        self._begin()

    def _begin(self) -> None:
        """Draw other points than those that are known by now."""
        samplers, seed = self._optuna.samplers, self._sweep.seed + self._known
        if self._sweep.searcher == "tpe":
            self._study.sampler = samplers.TPESampler(seed=seed)
        else:
            several = max(4, self._sweep.trials // 4)  # generations, however few trials there are
            self._study.sampler = samplers.NSGAIISampler(seed=seed, population_size=several)

    def ask(self) -> tuple[Any, Point] | None:
        """See `Search.ask`."""
        trial, point = self._study.ask(), Point()
        for path, parameter in self._space.items():
            if not is_varied(parameter, point):
                continue
            point[path] = self._suggested(trial, path, parameter)
        return trial, point

    def _suggested(self, trial: Any, path: str, parameter: Parameter) -> Any:
        if parameter.choice is not None:
            return trial.suggest_categorical(path, parameter.choice)
        low, high = parameter.bounds
        log = parameter.log is not None
        if parameter.whole:
            return trial.suggest_int(path, int(low), int(high), log=log)
        return float(f"{trial.suggest_float(path, low, high, log=log):.6g}")

    def tell(self, key: Any, values: Sequence[float] | None) -> None:
        """See `Search.tell`."""
        state = self._optuna.trial.TrialState.FAIL if values is None else None
        self._study.tell(key, values=values, state=state)

    def remember(self, point: Mapping[str, Any], values: Sequence[float] | None) -> None:
        """See `Search.remember`."""
        self._known += 1
        self._begin()
        if values is None:
            return
        distributions = self._optuna.distributions
        known = {}
        for path in point:
            parameter = self._space[path]
            low, high = parameter.bounds
            if parameter.choice is not None:
                known[path] = distributions.CategoricalDistribution(parameter.choice)
            elif parameter.whole:
                log = parameter.log is not None
                known[path] = distributions.IntDistribution(int(low), int(high), log=log)
            else:
                log = parameter.log is not None
                known[path] = distributions.FloatDistribution(low, high, log=log)
        trial = self._optuna.trial.create_trial(
            params=dict(point), distributions=known, values=list(values)
        )
        self._study.add_trial(trial)
