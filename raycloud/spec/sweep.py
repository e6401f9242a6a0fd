"""The `sweep` section of a job file: what is varied, what is sought, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from raycloud.errors import SpecError
from raycloud.spec.load import dump_job, load_job, read_section, with_values
from raycloud.spec.mistakes import combined, mistake
from raycloud.spec.rundir import KEPT
from raycloud.spec.sections import Auto, Section, wrong
from raycloud.spec.yaml_text import write

if TYPE_CHECKING:
    from raycloud.spec.job import Job

Objective = Literal["measure", "seconds", "samples", "bytes", "money"]
Scalar = bool | int | float | str | None
Point = dict[str, Any]  # a value for each field that is varied in it

SECTION = "sweep"
_FEWEST = 2  # trials of a population
_BESIDE = 0.2  # how far beside a value the next one lies, as a part of it


class Parameter(Section):
    """The values that a field may have: one of `choice`, `range` and `log`."""

    choice: Annotated[list[Scalar], Field(min_length=1)] | None = None
    """These values."""
    range: Annotated[list[int] | list[float | int], Field(min_length=2, max_length=2)] | None = None
    """From the first to the second, both in it, evenly; whole numbers where both are."""
    log: Annotated[list[int] | list[float | int], Field(min_length=2, max_length=2)] | None = None
    """The same, evenly by their logarithms."""
    when: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Other fields of the space, each with the value, or the list of values, for which this one is
    varied; else it is as in the job."""

    @model_validator(mode="after")
    def _one_of(self) -> Parameter:
        given = [name for name in ("choice", "range", "log") if getattr(self, name) is not None]
        if len(given) != 1:
            what = "says both " + " and ".join(given) if given else "says no values"
            raise wrong(
                what, "write one of `choice: [a, b]`, `range: [low, high]`, `log: [low, high]`"
            )
        low, high = self.bounds
        if not low < high and self.choice is None:
            raise wrong(f"its range from {low} to {high} is empty", "write the lower value first")
        if self.log is not None and not low > 0:
            raise wrong(f"has no logarithm at {low}", "begin above 0, or write `range`")
        if self.choice is not None and len({(type(v), v) for v in self.choice}) < len(self.choice):
            raise wrong("names a value twice", "name each once")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Of a range; of a choice they are of no meaning."""
        low, high = self.range or self.log or (0, 0)
        return low, high

    @property
    def whole(self) -> bool:
        """Whether a range is of whole numbers."""
        return all(type(bound) is int for bound in self.range or self.log or ())

    def at(self, part: float) -> Any:
        """The value at `part` of the way, 0 to 1, of all that it may have.

        >>> Parameter(range=[1, 4]).at(0.99), Parameter(log=[0.01, 1.0]).at(0.5)
        (4, 0.1)
        """
        if self.choice is not None:
            return self.choice[min(int(part * len(self.choice)), len(self.choice) - 1)]
        low, high = self.bounds
        if self.whole and self.range:
            return int(low + min(int(part * (high - low + 1)), int(high - low)))
        if self.range:
            return low + part * (high - low)
        value = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
        return round(value) if self.whole else float(f"{value:.6g}")

    def near(self, value: Any, *, up: bool) -> Any:
        """A value beside this one: the next of a choice; of a range, a fifth more or less.

        At an end it is the end's.

        >>> Parameter(choice=[8, 16, 32]).near(16, up=True)
        32
        >>> Parameter(log=[0.01, 1.0]).near(0.9, up=True), Parameter(range=[1, 9]).near(2, up=False)
        (1.0, 1)
        """
        if self.choice is not None:
            at = self.choice.index(value) + (1 if up else -1)
            return self.choice[min(max(at, 0), len(self.choice) - 1)]
        low, high = self.bounds
        other = value * (1 + _BESIDE if up else 1 - _BESIDE)
        if self.whole:
            other = max(round(other), value + 1) if up else min(round(other), value - 1)
        other = min(max(other, low), high)
        return other if self.whole else float(f"{other:.6g}")

    def samples(self) -> tuple[Any, ...]:
        """Values at which to see whether the job takes them: all of a choice, a range's ends."""
        return tuple(self.choice) if self.choice is not None else (self.at(0.0), self.at(1.0))

    def may_be(self, value: object) -> bool:
        """Whether it may have this value."""
        if self.choice is not None:
            return any(type(one) is type(value) and one == value for one in self.choice)
        low, high = self.bounds
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low <= value <= high


class Sweep(Section):
    """Trials of one job with other values, to find those that serve best."""

    space: dict[str, Parameter] = Field(min_length=1)
    """What is varied: fields of the job by their path, as after `--set`, e.g. `global_batch`,
    `sync.codec` or `settings.learning_rate`."""
    measure: str = Field(default="loss", min_length=1)
    """The measure of the held-out samples that is looked at."""
    mode: Literal["min", "max"] = "min"
    """Whether less of it is better, or more."""
    target: float | None = Field(default=None, allow_inf_nan=False)
    """A trial ends once it has come so far. null: it ends with its last step."""
    minimize: Annotated[tuple[Objective, ...], Field(min_length=1, strict=False)] = ("measure",)
    """What is sought: the best `measure` at a trial's end, or the least seconds, samples, bytes
    sent or money, to the target where there is one. Several have no one best trial but a front of
    those that no other trial beats in all."""
    searcher: Literal["random", "grid", "tpe", "nsga2", "pbt"] = "random"
    """How points are found. random: drawn evenly. grid: all, in turn. tpe: a tree of Parzen
    estimators. nsga2: a genetic algorithm, for several objectives. These two need the extra
    `raycloud[sweep]`. pbt: population-based training, in which values change while a model trains:
    after each generation the worst quarter of the trials end, and others begin from where the best
    stand, with their values a little changed."""
    scheduler: Literal["asha", "median", "none"] = "none"
    """Which trials end early. asha: at each rung, `reduction` times as far as the one before, only
    the best go on; with several objectives by the fronts of those that no other beats, in the
    measure too. median: a trial worse than the median of all ends. Trials are compared after as
    many samples, not steps; by asha, where a `target` is to be reached with the least of one thing,
    after as many seconds, bytes or what it is. Then a trial ends too, by either, once it has spent
    what another one has needed."""
    reduction: int = Field(default=4, ge=2)
    """Of `asha`: one in so many goes on."""
    grace_steps: int | None = Field(default=None, ge=1)
    """Steps, of the job's `global_batch`, before a trial may be ended early. null: as many as
    between two measurements."""
    generation_steps: int | None = Field(default=None, ge=1)
    """Of `pbt`: steps of a generation. null: as many as between two measurements."""
    rate_scaling: Literal["none", "linear", "sqrt", "adascale"] = "sqrt"
    """The job's `rate_scaling` in trials of another `global_batch` than the job's, where the job
    names no `base_batch` itself."""
    trials: int = Field(default=16, ge=1)
    """Most trials. Of `pbt`: so many at a time."""
    parallel: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Trials at once. auto: as many as the machines hold with their fewest workers each."""
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """No trial begins later than this; those that run are ended. null: no limit."""
    money: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same, of what the machines cost. null: no limit."""
    finalists: int = Field(default=0, ge=0)
    """So many of the best trials are trained once more after the others, one at a time. The best of
    these is the best of the sweep: the same steps take other seconds at another time. It needs a
    `target`, and seconds or money to be the only thing in `minimize`."""
    seed: int = Field(default=0, ge=0)
    """Of what is drawn."""

    @model_validator(mode="after")
    def _together(self) -> Sweep:
        if len(set(self.minimize)) < len(self.minimize):
            raise wrong("minimize names an objective twice", "name each once")
        ranges = [path for path, one in self.space.items() if one.choice is None]
        if self.searcher == "grid" and ranges:
            problem = f"searcher grid has no end: {', '.join(ranges)} is a range"
            raise wrong(problem, "write `choice` there, or another searcher")
        several = len(self.minimize) > 1
        if several and self.scheduler == "median":
            problem = "scheduler median does not go together with several objectives"
            raise wrong(problem, "write `scheduler: asha` or `none`, or one objective")
        if self.finalists and self.spends not in {"seconds", "money"}:
            problem = "finalists would come to the same once more: neither seconds nor money decide"
            hint = "leave it out, or write a `target` and `minimize: [seconds]`"
            raise wrong(problem, hint)
        if self.searcher == "nsga2" and not several:
            raise wrong("searcher nsga2 is for several objectives", "write `searcher: tpe`")
        if self.searcher == "pbt":
            self._check_population()
        elif self.generation_steps is not None:
            problem = f"generation_steps is of searcher pbt, not of {self.searcher}"
            raise wrong(problem, "leave it out")
        for path, parameter in self.space.items():
            for other, values in parameter.when.items():
                self._check_condition(path, other, values)
        return self

    def _check_condition(self, path: str, other: str, values: Scalar | list[Scalar]) -> None:
        names = [*self.space]
        if other not in names:
            problem = f"{path} is varied only for values of {other}, which is not"
            raise wrong(problem, "put that into the space, or leave the condition out")
        if names.index(other) >= names.index(path):
            raise wrong(f"{path} comes before {other}, on which it depends", "swap the two")
        every = values if isinstance(values, list) else [values]
        if impossible := [value for value in every if not self.space[other].may_be(value)]:
            problem = f"{path} is varied for {other} = {impossible[0]!r}, which it never is"
            raise wrong(problem, f"write one of the values of {other}")

    def _check_population(self) -> None:
        """Whether there is a best in each generation, and someone to end."""
        if self.minimize != ("measure",) or self.target is not None:
            problem = "searcher pbt seeks the best measure at the last step"
            raise wrong(problem, "leave `minimize` and `target` out, or write another searcher")
        if self.scheduler != "none":
            problem = f"scheduler {self.scheduler} does not go together with searcher pbt"
            raise wrong(problem, "write `scheduler: none`: pbt itself ends trials")
        if self.trials < _FEWEST:
            problem = f"searcher pbt has nobody to learn from among {self.trials} trials"
            raise wrong(problem, f"write `trials: {_FEWEST}` or more")

    @property
    def spends(self) -> str | None:
        """The one thing of which a target is to take the least; None: it is not that simple."""
        first, *more = self.minimize
        return first if self.target is not None and not more and first != "measure" else None

    @property
    def ends_early(self) -> bool:
        """Whether trials may end before their last step."""
        return self.scheduler != "none" or self.target is not None or self.searcher == "pbt"


class File(Section):
    """What a job file has beside the job."""

    sweep: Sweep
    """What is varied, what is sought, and how."""


def load_sweep(
    path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True
) -> tuple[Job, Sweep]:
    """Read a job file with a `sweep` section.

    Args:
        path: The YAML file.
        overrides: As of `load_job`; those below `sweep.` are of the section.
        check_files: As of `load_job`.

    Raises:
        SpecError: It cannot be read, has no such section, or one that does not go with the job.
    """
    prefix = f"{SECTION}."
    of_job = [text for text in overrides if not text.startswith(prefix)]
    job = load_job(path, of_job, check_files=check_files)
    own = [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)]
    values = read_section(Path(path), SECTION, own)
    told: dict[str, Any] = {SECTION: values}
    sweep = File(**told).sweep
    check(job, sweep)
    return job, sweep


def check(job: Job, sweep: Sweep) -> None:
    """Whether the job takes every value of the space, and trials can be compared.

    Raises:
        SpecError: For every mistake.
    """
    errors = [*_refused(job, sweep)]
    for path in sweep.space:
        if path.startswith(("resources.", "elastic.min_workers", "checkpoint.path", "name")):
            problem = "is the same for all trials, which share the machines"
            errors.append(mistake(f"sweep.space.{path}", path, problem, "leave it out"))
    if sweep.searcher == "pbt":
        errors.extend(_refused_while_training(job, sweep))
    if sweep.ends_early and job.evaluate.every_steps is None:
        what = f"scheduler {sweep.scheduler}" if sweep.scheduler != "none" else "a target"
        what = "searcher pbt" if sweep.searcher == "pbt" else what
        problem = f"is not set, and {what} needs measurements on the way"
        errors.append(mistake("evaluate.every_steps", None, problem, "write a number of steps"))
    if errors:
        raise combined(errors)


def _refused(job: Job, sweep: Sweep) -> Iterator[SpecError]:
    """The errors of values that the job does not take, each beside the first of the others."""
    usual = next(points(sweep.space))
    for path, parameter in sweep.space.items():
        for value in parameter.samples():
            point = {**usual, **_allowing(sweep.space, path), path: value}
            for other, one in sweep.space.items():
                if other not in point and is_varied(one, point):
                    point[other] = one.samples()[0]
            try:
                with_values(job, point)
            except SpecError as error:
                yield error
                break


def _refused_while_training(job: Job, sweep: Sweep) -> Iterator[SpecError]:
    """The errors of what a model cannot change while it trains."""
    for path in sweep.space:
        if any(field == path or field.startswith(f"{path}.") for field in KEPT):
            problem = "is what the order of samples follows: it cannot change while a model trains"
            yield mistake(f"sweep.space.{path}", path, problem, "leave it out")
    if job.steps is None:
        problem = "is not set, and searcher pbt goes by steps"
        yield mistake("steps", None, problem, "write a number of steps in place of `epochs`")


def _allowing(space: Mapping[str, Parameter], path: str) -> Point:
    """Values of other fields for which this one is varied."""
    found: Point = {}
    for other, values in space[path].when.items():
        found |= _allowing(space, other)
        found[other] = values[0] if isinstance(values, list) else values
    return found


def trial_job(job: Job, sweep: Sweep, point: Mapping[str, Any]) -> Job:
    """The job of a trial: with the values of its point, and the rates that go with its batch.

    Raises:
        SpecError: It does not take them.
    """
    follows: Point = {}
    if "global_batch" in point and job.base_batch is None:
        follows = {"base_batch": job.global_batch, "rate_scaling": sweep.rate_scaling}
    return with_values(job, {**follows, **point})


def dump_sweep(job: Job, sweep: Sweep) -> str:
    """Both as one file, every field written out; it reads back as they are."""
    return dump_job(job) + write({SECTION: sweep.model_dump(mode="json", exclude_none=True)})


def is_varied(parameter: Parameter, point: Mapping[str, Any]) -> bool:
    """Whether a field is varied where those before it have these values."""
    return all(
        other in point and point[other] in (values if isinstance(values, list) else [values])
        for other, values in parameter.when.items()
    )


def points(space: Mapping[str, Parameter]) -> Iterator[Point]:
    """All points of a space of choices, the last field fastest; of a range, its ends."""
    yield from _points([*space.items()], {})


def _points(left: Sequence[tuple[str, Parameter]], point: Point) -> Iterator[Point]:
    if not left:
        yield point
        return
    (path, parameter), *rest = left
    if not is_varied(parameter, point):
        yield from _points(rest, point)
        return
    for value in parameter.samples():
        yield from _points(rest, {**point, path: value})
