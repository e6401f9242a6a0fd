"""What a sweep has found: its log, the best trials, and those that no other beats.

`sweep.jsonl` has a line for each word of a trial: begun, measured, ended. The last one of a trial
counts. Lines of a newer format are refused; the last line may be cut off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from raycloud.errors import RunDirectoryError

FORMAT = 1
LOG, JOB, STOP = "sweep.jsonl", "sweep.yaml", "stop"  # files of a sweep's directory
CHARTS = "charts"  # and a folder there

Status = Literal["running", "finished", "reached", "stopped", "failed"]
DONE = frozenset({"finished", "reached"})  # what came to something
OVER = frozenset({"finished", "reached", "stopped", "failed"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Where a trial stands.

    Attributes:
        step: Steps done.
        measure: Of the held-out samples, after them.
        seconds: Since its first member began to compute.
        samples: Computed.
        bytes: Sent for exchanges of gradients.
        money: What its machines have cost; None: nobody knows.
    """

    step: int
    measure: float
    seconds: float
    samples: int
    bytes: int
    money: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A trial that has begun as another, whose state it had.

    Attributes:
        parent: The other's number.
        replaces: The trial that ended for it.
        step: Steps done by then.
    """

    parent: int
    replaces: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One trial, as its last line says.

    Attributes:
        number: From 0.
        point: The values that it was given.
        status: running; finished: it made its last step; reached: it came to the target; stopped:
            it was ended early; failed.
        measured: Each measurement.
        why: Of a failure, or of an end.
        fork: Where it began; None: by itself.
        again: The trial whose point it trains once more, to see who is best; None: none.
    """

    number: int
    point: Mapping[str, Any]
    status: Status = "running"
    measured: tuple[Measured, ...] = ()
    why: str = ""
    fork: Fork | None = None
    again: int | None = None

    @property
    def last(self) -> Measured | None:
        """Where it stands."""
        return self.measured[-1] if self.measured else None

    @property
    def money(self) -> float:
        """What its machines have cost, without those of whom it has begun as; 0: nobody knows."""
        spent = (self.last.money if self.last else None) or 0.0
        before = (self.measured[0].money if self.fork and self.measured else None) or 0.0
        return spent - before


@dataclass
class Results:
    """All trials of a sweep, kept in a file as they come.

    Args:
        path: Of the log; it is made where there is none, else gone on with.
    """

    path: Path
    trials: dict[int, Trial] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, *, writes: bool = False) -> Results:
        """What is known already; `writes`: it is gone on with.

        Raises:
            RunDirectoryError: The file is damaged, or of a newer format.
        """
        found = cls(path)
        if not path.exists():
            return found
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                found._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise RunDirectoryError(
                    f"{path}:{number} is damaged: {error}",
                    hint="delete the line, or begin the sweep in another directory",
                ) from error
        if lines[-1] and writes:  # a word that was cut off as its writer ended
            path.write_bytes(b"\n".join([*lines[:-1], b""]))
        return found

    def _take(self, record: Mapping[str, Any]) -> None:
        if record["format"] != FORMAT:
            raise ValueError(f"it is of format {record['format']}, this raycloud reads {FORMAT}")
        number = record["trial"]
        before = self.trials.get(number, Trial(number=number, point={}))
        measured = before.measured
        if "measured" in record:
            new = Measured(**record["measured"])
            measured = (*(one for one in measured if one.step < new.step), new)
        self.trials[number] = Trial(
            number=number,
            point=record.get("point", before.point),
            status=record.get("status", before.status),
            measured=measured,
            why=record.get("why", before.why),
            fork=Fork(**record["fork"]) if "fork" in record else before.fork,
            again=record.get("again", before.again),
        )

    def add(self, trial: int, **said: Any) -> Trial:
        """Keep what is said of a trial, by the names of its attributes."""
        for name in said.keys() & {"measured", "fork"}:
            said[name] = asdict(said[name])
        record = {"format": FORMAT, "trial": trial, **said}
        self._take(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return self.trials[trial]

    @property
    def whole(self) -> list[Trial]:
        """Those that are over, by number."""
        return [trial for _, trial in sorted(self.trials.items()) if trial.status in OVER]

    def overtaken(self, spent: Mapping[str, Any], minimize: Sequence[str], target: float) -> bool:
        """Whether a trial has spent by now what another one has needed to come to the target.

        What is spent only grows, so that no trial ends by this which would have been among the
        best. Of `measure` that cannot be said: where it is sought, too, nobody is overtaken.

        Args:
            spent: A measurement of the trial, as plain values.
            minimize: What is sought.
            target: Where trials end.
        """
        if "measure" in minimize or any(spent.get(name) is None for name in minimize):
            return False
        own = tuple(float(spent[name]) for name in minimize)
        found = (objectives(t, minimize, mode="min", target=target) for t in self.trials.values())
        return any(all(a <= b for a, b in zip(one, own, strict=True)) for one in found if one)

    @property
    def unfinished(self) -> list[Trial]:
        """Those that had begun, by number."""
        return [trial for _, trial in sorted(self.trials.items()) if trial.status not in OVER]


def objectives(
    trial: Trial, minimize: Sequence[str], *, mode: str, target: float | None
) -> tuple[float, ...] | None:
    """What a trial came to, in the order of `minimize`, less is better; None: to nothing.

    With a target, only what has reached it came to something; without one what made its last step.
    """
    wanted = {"reached"} if target is not None else {"finished"}
    if trial.status not in wanted or trial.last is None:
        return None
    found = []
    for name in minimize:
        value = getattr(trial.last, name)
        if value is None:
            return None
        found.append(-value if name == "measure" and mode == "max" else value)
    return tuple(found) if all(map(math.isfinite, found)) else None


def finalist(
    scored: Iterable[tuple[Trial, tuple[float, ...]]], begun: Collection[int | None], many: int
) -> Trial | None:
    """Which of the so many best trials is trained once more now; None: `begun` has them all."""
    every = sorted(scored, key=lambda pair: pair[1])
    first = [trial for trial, _ in every if trial.again is None][:many]
    return next((trial for trial in first if trial.number not in begun), None)


def front(scored: Iterable[tuple[Trial, tuple[float, ...]]]) -> list[Trial]:
    """The trials that no other is as good as in all objectives and better in one; best first."""
    every = sorted(scored, key=lambda pair: pair[1])
    return [
        trial
        for trial, values in every
        if not any(
            other != values and all(a <= b for a, b in zip(other, values, strict=True))
            for _, other in every
        )
    ]
