"""What a run under faults came to, held against the same run without them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import RunDirectoryError
from raycloud.faults.schedule import Action
from raycloud.redact import redact
from raycloud.report.chaos_sides import Pause, Side, side_record

if TYPE_CHECKING:
    from raycloud.checkpoint.payload import Difference
    from raycloud.faults import Fault, Hit

FORMAT = 1

FLOAT64_BOUND = 1e-9
TIMES = 3.0  # of what another order of summing makes, in numbers less precise than float64
_SOON_S = 10.0  # a connection that was cut is noticed within this time
_EARLY_S = 0.02  # two clocks differ by so much, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far the two may be apart.

    Attributes:
        value: At most so far.
        why: What it follows from.
    """

    value: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the faults came to.

    Attributes:
        job: The job's name.
        seed: What the faults were drawn from; None: they were read from a file.
        workers: Most workers.
        undisturbed: The run without faults.
        disturbed: The run with them.
        difference: Between their last checkpoints; None where they cannot be compared.
        bound: What that is held to.
        hits: What was done, in order.
        left: Faults that did not happen: the run ended before.
    """

    job: str
    seed: int | None
    workers: int
    undisturbed: Side
    disturbed: Side
    difference: Difference | None
    bound: Bound | None
    hits: tuple[Hit, ...] = ()
    left: tuple[Fault, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """The parameters are those of the undisturbed run, within the bound."""
        if self.difference is None or self.bound is None:
            return False
        return self.difference.largest <= self.bound.value

    @property
    def proved(self) -> bool:
        """They agree, and both ledgers are exact."""
        return self.agrees and self.undisturbed.exact and self.disturbed.exact

    def pause_of(self, hit: Hit) -> Pause | None:
        """The recovery that a fault made necessary; None: it needed none."""
        if hit.why:
            return None
        at_s = hit.t - self.disturbed.started_t
        again_s = min((t for t in self._hits_on(hit.member) if t > at_s), default=math.inf)
        for pause in self.disturbed.pauses:
            if hit.member in pause.lost and pause.detected_s <= again_s:
                return pause
            cut = hit.fault.action is Action.CUT and pause.resumed_s >= at_s
            if cut and -_EARLY_S <= pause.detected_s - at_s <= _SOON_S:
                return pause
        return None

    def _hits_on(self, member: int) -> list[float]:
        """When a worker was harmed, in seconds from the run's start."""
        started_t = self.disturbed.started_t
        return [hit.t - started_t for hit in self.hits if hit.member == member and not hit.why]

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        apart, bound = self.difference, self.bound
        record = {
            "format": FORMAT,
            "job": self.job,
            "seed": self.seed,
            "workers": self.workers,
            "proved": self.proved,
            "agrees": self.agrees,
            "difference": None
            if apart is None
            else {
                "largest": _finite(apart.largest),
                "tensor": apart.tensor,
                "parameters": _finite(apart.parameters),
                "tensors": apart.tensors,
                "step": apart.step,
                "precision": apart.precision,
            },
            "bound": None if bound is None else {"value": bound.value, "why": bound.why},
            "faults": [self._record_of(hit) for hit in self.hits],
            "left": [fault.to_record() for fault in self.left],
            "undisturbed": side_record(self.undisturbed),
            "disturbed": side_record(self.disturbed),
        }
        redacted: dict[str, Any] = redact(record)
        return redacted

    def _record_of(self, hit: Hit) -> dict[str, Any]:
        pause = self.pause_of(hit)
        at_s = hit.t - self.disturbed.started_t
        return {
            **hit.fault.to_record(),
            "member": hit.member,
            "step": hit.step,
            "t_s": at_s,
            "why": hit.why,
            "noticed_s": None if pause is None else pause.detected_s - at_s,
            "resumed_s": None if pause is None else pause.resumed_s - at_s,
        }


def _finite(value: float) -> float | None:
    """None for what JSON has no word for: some tensor is not a number."""
    return value if math.isfinite(value) else None


def bound_of(precision: str, other_order: float | None = None) -> Bound:
    """What two runs of a job are held to.

    Args:
        precision: The number type of the model's parameters.
        other_order: How far a run by one worker is from the undisturbed one; needed where that type
            is not `float64`.
    """
    if precision == "float64":
        return Bound(value=FLOAT64_BOUND, why="float64")
    return Bound(
        value=TIMES * (other_order or 0.0),
        why=f"{precision}: {TIMES:g} times what a run by one worker, which adds up in another "
        "order, differs by",
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of it beside the two runs, in one directory."""

    path: Path

    @property
    def schedule(self) -> Path:
        """The faults, to be asked for again."""
        return self.path / "schedule.yaml"

    @property
    def record(self) -> Path:
        """The outcome."""
        return self.path / "chaos.json"

    @property
    def page(self) -> Path:
        """The outcome, for people."""
        return self.path / "chaos.html"

    def write_schedule(self, text: str) -> None:
        """Keep the faults, before any happens.

        Raises:
            RunDirectoryError: It cannot be written.
        """
        self._write(self.schedule, text)

    def write(self, outcome: Outcome, page: str) -> None:
        """Keep the outcome, as a record and as a page.

        Raises:
            RunDirectoryError: It cannot be written.
        """
        record = json.dumps(outcome.to_record(), indent=2, allow_nan=False)
        self._write(self.record, record + "\n")
        self._write(self.page, page)

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(path.name + ".draft")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be written: {error.strerror}", hint="give another --out"
            ) from error
