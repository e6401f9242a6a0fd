"""Schedules of faults: which ones a run is to meet and when, from a file or drawn by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from raycloud.bounded import read_whole
from raycloud.errors import SpecError
from raycloud.order import stream_seed
from raycloud.spec.sections import Section
from raycloud.spec.yaml_text import YamlRefusedError, parse, write

FORMAT = 1
LARGEST_FILE_BYTES = 2**18
MOST_FAULTS = 1000
LONGEST_S = 3600

_FILE = "schedule"
_EXAMPLE = "{at_step: 20, action: kill}"
_ORDER = ("at_step", "at_s", "action", "rank", "many", "seconds", "recovering")
_STREAM = 5  # of what is drawn from a seed


class Action(StrEnum):
    """What may be done to a worker."""

    KILL = "kill"  # its process ends at once
    FREEZE = "freeze"  # its process stands still for a while
    TERMINATE = "terminate"  # its process gets SIGTERM: a notice
    CUT = "cut"  # its connections to other workers end


# How often what is drawn.
OFTEN: Final[Mapping[Action, float]] = {
    Action.KILL: 0.4,
    Action.CUT: 0.25,
    Action.FREEZE: 0.2,
    Action.TERMINATE: 0.15,
}
_TOGETHER = 0.2  # the chance that two are hit at once
_AGAIN = 0.25  # the chance that a fault comes during the recovery from the one before
_BRIEF_S, _LONG_S = (0.2, 1.0), (3.0, 8.0)  # how long one is frozen: unnoticed, and noticed


_Count = Annotated[int, Field(lt=2**31)]
_Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]


class Fault(Section):
    """One fault: what is done to whom, and when."""

    action: Annotated[Action, Field(strict=False)]
    """What is done."""
    at_step: Annotated[_Count, Field(ge=1)] | None = None
    """It is due once so many steps are committed; or give `at_s`."""
    at_s: _Seconds | None = None
    """It is due so many seconds after the first committed step."""
    rank: Annotated[_Count, Field(ge=0)] = 0
    """Which of those that compute and are unharmed, in the order of their ranks, round and round;
    with `many`, the first of them."""
    many: Annotated[_Count, Field(ge=1)] = 1
    """How many at once."""
    seconds: _Seconds = 0.0
    """For how long they are frozen."""
    recovering: bool = False
    """Whether it waits until the next recovery has begun."""

    def to_record(self) -> dict[str, Any]:
        """The fields of a schedule's file that say it."""
        said = self.model_dump(mode="json", exclude_defaults=True) | {"rank": self.rank}
        return {name: said[name] for name in _ORDER if name in said}

    def __str__(self) -> str:
        """It, for people."""
        when = f"{self.at_s:g} s" if self.at_step is None else f"step {self.at_step}"
        what = f"{self.action} {self.many} at once" if self.many > 1 else f"{self.action}"
        long = f" for {self.seconds:g} s" if self.action is Action.FREEZE else ""
        return f"{when}: {what}{long}{', during a recovery' if self.recovering else ''}"


def drawn(seed: int, *, faults: int, steps: int, workers: int) -> tuple[Fault, ...]:
    """Faults by chance, in order; the same for the same arguments.

    They come between a twentieth and nine tenths of the steps, so that each can be recovered from,
    and two workers are hit at once where there is a third, and nobody is recovered from.
    """
    chance = np.random.Generator(np.random.PCG64(stream_seed(seed, _STREAM)))
    shares = np.array(list(OFTEN.values()))
    low, high = max(1, steps // 20), max(2, steps * 9 // 10)
    moments = sorted(int(step) for step in chance.integers(low, high, size=faults))
    found = list[Fault]()
    for step in moments:
        action = list(OFTEN)[int(chance.choice(len(shares), p=shares))]
        together = chance.random() < _TOGETHER and action is not Action.CUT
        seconds = 0.0
        if action is Action.FREEZE:
            shortest_s, longest_s = _BRIEF_S if chance.random() < 0.5 else _LONG_S  # noqa: PLR2004 - a coin
            seconds = round(float(chance.uniform(shortest_s, longest_s)), 2)
        before = found[-1] if found else None
        again = bool(chance.random() < _AGAIN) and before is not None and _breaks(before)
        found.append(
            Fault(
                action=action,
                at_step=before.at_step if again and before is not None else step,
                rank=int(chance.integers(0, 8)),
                many=2 if together and not again and workers > 2 else 1,  # noqa: PLR2004 - and one more
                seconds=seconds,
                recovering=again,
            )
        )
    return tuple(found)


def _breaks(fault: Fault) -> bool:
    """Whether a recovery follows."""
    brief = fault.action is Action.FREEZE and fault.seconds < _LONG_S[0]
    return fault.action is not Action.TERMINATE and not brief


def schedule_text(faults: Sequence[Fault]) -> str:
    """A schedule's file, which `load_schedule` reads back."""
    return write({"format": FORMAT, "faults": [fault.to_record() for fault in faults]})


class _Schedule(Section):
    format: Literal[1] = Field(description="Version of the file's format.")
    faults: list[Fault] = Field(
        min_length=1, max_length=MOST_FAULTS, description=f"Lines like `- {_EXAMPLE}`."
    )


def load_schedule(path: Path) -> tuple[Fault, ...]:
    """Read a schedule: `{format: 1, faults: [...]}` with the fields of `Fault`, as YAML or JSON.

    Raises:
        SpecError: It cannot be read, or something in it cannot be.
    """
    try:
        content = parse(read_whole(path, LARGEST_FILE_BYTES).decode("utf-8")).value
    except YamlRefusedError as error:
        place = f"{error.problem} (line {error.line})"
        raise SpecError(_FILE, str(path), place, hint=error.hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "write the path of a schedule; `--seed` draws one"
        raise SpecError(_FILE, str(path), f"cannot be read: {why}", hint=hint) from error
    if not isinstance(content, dict) or set(content) - {"format", "faults"}:
        raise SpecError(
            _FILE,
            str(path),
            "is not the fields `format` and `faults` alone",
            hint=f"write `format: {FORMAT}` and below `faults:` lines like `- {_EXAMPLE}`",
        )
    faults = _Schedule(**content).faults
    for n, fault in enumerate(faults):
        _check_fields(f"faults[{n}]", fault)
    return tuple(faults)


def _check_fields(where: str, fault: Fault) -> None:
    if (fault.at_step is None) == (fault.at_s is None):
        problem, hint = "at_step or at_s says when, one of them", f"write it as {_EXAMPLE}"
        raise SpecError(f"{where}.at_step", fault.at_step, problem, hint=hint)
    freezes = fault.action is Action.FREEZE
    if freezes != (fault.seconds > 0):
        hint = "write how long it is frozen, as in `{at_step: 20, action: freeze, seconds: 4}`"
        hint, problem = hint if freezes else "leave it out", "says for how long a freeze lasts"
        raise SpecError(f"{where}.seconds", fault.seconds, problem, hint=hint)


def check(faults: Sequence[Fault], *, workers: int, steps: int | None) -> None:
    """Whether a run of so many workers and steps can meet all of them.

    Raises:
        SpecError: One never comes, or would leave nobody.
    """
    for n, fault in enumerate(faults):
        if steps is not None and fault.at_step is not None and fault.at_step >= steps:
            raise SpecError(
                f"faults[{n}].at_step",
                fault.at_step,
                f"the run ends with step {steps}",
                hint=f"write a step before {steps}, or raise --steps",
            )
        if fault.many >= workers:
            raise SpecError(
                f"faults[{n}].many",
                fault.many,
                f"the run has {workers} workers at most, and one has to be left",
                hint=f"write at most {workers - 1}, or --set elastic.max_workers={fault.many + 1}",
            )
