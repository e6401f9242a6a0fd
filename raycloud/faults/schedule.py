"""Which faults a run is to meet, and when: read from a file, or drawn by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from raycloud.bounded import read_whole
from raycloud.errors import SpecError
from raycloud.order import stream_seed
from raycloud.spec.mistakes import NOT_SET
from raycloud.spec.yaml_text import YamlRefusedError, parse, write

FORMAT = 1
LARGEST_FILE_BYTES = 2**18
MOST_FAULTS = 1000
LONGEST_S = 3600.0

_FILE = "schedule"
_EXAMPLE = "{at_step: 20, action: kill}"
_FIELDS = ("at_step", "at_s", "action", "rank", "many", "seconds", "recovering")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what, to whom, and when.

    Attributes:
        action: What is done.
        at_step: Once a report says that so many steps are committed; None: by `at_s`.
        at_s: So many seconds after the first such report.
        rank: Which of those that compute and are unharmed, in the order of their ranks, round and
            round; with `many`, the first of them.
        many: How many at once.
        seconds: For how long they are frozen.
        recovering: Not before the next recovery has begun.
    """

    action: Action
    at_step: int | None = None
    at_s: float | None = None
    rank: int = 0
    many: int = 1
    seconds: float = 0.0
    recovering: bool = False

    def to_record(self) -> dict[str, Any]:
        """The fields of a schedule's file that say it."""
        when = {"at_s": self.at_s} if self.at_step is None else {"at_step": self.at_step}
        record: dict[str, Any] = {**when, "action": self.action.value, "rank": self.rank}
        if self.many > 1:
            record["many"] = self.many
        if self.action is Action.FREEZE:
            record["seconds"] = self.seconds
        if self.recovering:
            record["recovering"] = True
        return record

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
    if content.get("format") != FORMAT:
        number = content.get("format", NOT_SET)
        raise SpecError("format", number, "is not known", hint=f"write format: {FORMAT}")
    faults = content.get("faults", NOT_SET)
    if not isinstance(faults, list) or not 0 < len(faults) <= MOST_FAULTS:
        raise SpecError(
            "faults",
            faults,
            f"is not a list of 1 to {MOST_FAULTS} faults",
            hint=f"write lines like `- {_EXAMPLE}`",
        )
    return tuple(_fault(f"faults[{n}]", value) for n, value in enumerate(faults))


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


def _fault(where: str, value: Any) -> Fault:
    if not isinstance(value, dict):
        raise SpecError(where, value, "is not a fault", hint=f"write it as {_EXAMPLE}")
    for name in value:
        if name not in _FIELDS:
            hint = f"use {', '.join(_FIELDS)}"
            raise SpecError(f"{where}.{name}", value[name], "is not known", hint=hint)
    action = value.get("action", NOT_SET)
    if action not in list(Action):
        hint = f"write one of {', '.join(Action)}"
        raise SpecError(f"{where}.action", action, "is not known", hint=hint)
    if ("at_step" in value) == ("at_s" in value):
        raise SpecError(
            f"{where}.at_step",
            value.get("at_step", NOT_SET),
            "at_step or at_s says when, one of them",
            hint=f"write it as {_EXAMPLE}",
        )
    if (action == Action.FREEZE) != ("seconds" in value):
        told = value.get("seconds", NOT_SET)
        hint = "write how long it is frozen, as in `{at_step: 20, action: freeze, seconds: 4}`"
        if action != Action.FREEZE:
            hint = "leave it out"
        raise SpecError(f"{where}.seconds", told, "says for how long a freeze lasts", hint=hint)
    recovering = value.get("recovering", False)
    if not isinstance(recovering, bool):
        hint = "write true or false"
        raise SpecError(f"{where}.recovering", recovering, "is not true or false", hint=hint)
    return Fault(
        action=Action(action),
        at_step=_whole(where, value, "at_step", 1) if "at_step" in value else None,
        at_s=_seconds(where, value, "at_s") if "at_s" in value else None,
        rank=_whole(where, value, "rank", 0),
        many=_whole(where, value, "many", 1),
        seconds=_seconds(where, value, "seconds"),
        recovering=recovering,
    )


def _whole(where: str, value: Mapping[str, Any], name: str, least: int) -> int:
    number = value.get(name, least)
    if type(number) is not int or not least <= number < 2**31:
        hint = f"write a whole number from {least} up"
        raise SpecError(f"{where}.{name}", number, "is not possible", hint=hint)
    return number


def _seconds(where: str, value: Mapping[str, Any], name: str) -> float:
    number = value.get(name, 0.0)
    known = isinstance(number, int | float) and not isinstance(number, bool)
    if not known or not math.isfinite(number) or not 0 <= number <= LONGEST_S:
        hint = f"write seconds from 0 to {LONGEST_S:g}"
        raise SpecError(f"{where}.{name}", number, "is not possible", hint=hint)
    return float(number)
