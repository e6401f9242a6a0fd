"""How a run stands at a moment: one record, from the run's tally. Prints nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from raycloud.redact import redact
from raycloud.report import rates
from raycloud.report.recoveries import NAMES, counts, counts_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from raycloud.report.tally import Tally

FORMAT = 1

_ENDED = frozenset({"finished", "stopped", "failed", "killed"})
_MOST_TEXT = 1024  # characters of a text in a card


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """How a run stands. None: not known.

    Attributes:
        run: The name of its run directory.
        job: The job's name.
        status: `starting`, `running`, `stopping`; `finished`, `stopped`, `failed` once it has
            ended; `killed` where its driver is gone without a last word.
        t: Unix seconds of this moment.
        step: Steps that every member has committed.
        steps: Steps of the whole job.
        samples: Samples in these steps.
        loss: Of the newest reported steps.
        samples_per_s: Over the last quarter of a minute.
        left_s: Seconds until the last step, at that rate.
        workers: Members of the generation; while it starts, those that are asked for.
        ready: Of these, how many are ready.
        members: Their numbers, in the order of `shares`, their micro-batches per step.
        generation: None before the first.
        recoveries: Of all kinds, in all sessions; then how many of each, as `recoveries.counts`
            has them. A card of an older raycloud has none of these.
        bytes_sent: By all members, for the exchange of gradients.
        checkpoint_step: The newest checkpoint, published at `checkpoint_t` unix seconds.
        cost: So far, by the prices that nodes are labelled with, in the labels' currency.
        error: Why it failed.
        directory: The run directory, on the machine of its driver.
    """

    run: str
    job: str
    status: str
    t: float
    step: int = 0
    steps: int | None = None
    samples: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    workers: int = 0
    ready: int = 0
    members: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    generation: int | None = None
    recoveries: int = 0
    lost: int = 0
    rolled_back: int = 0
    met_anew: int = 0
    taken_over: int = 0
    resumed: int = 0
    bytes_sent: int = 0
    checkpoint_step: int | None = None
    checkpoint_t: float | None = None
    cost: float | None = None
    error: str | None = None
    directory: str = ""

    @property
    def recoveries_text(self) -> str:
        """The recoveries by kind, for people."""
        counted = {name: int(getattr(self, name)) for name in NAMES.values()}
        return counts_text(counted) if sum(counted.values()) else str(self.recoveries or "none")

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, one way or another."""
        return self.status in _ENDED

    def after_end(self) -> Card:
        """The same, once its driver is gone: without a last word it was killed."""
        status = self.status if self.has_ended else "killed"
        return replace(self, status=status, samples_per_s=None, left_s=None)

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        record: dict[str, Any] = {"format": FORMAT}
        for one in fields(self):
            value = getattr(self, one.name)
            record[one.name] = list(value) if isinstance(value, tuple) else value
        redacted: dict[str, Any] = redact(record)
        return redacted

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Card:
        """The inverse of `to_record`; unknown names are left out.

        Raises:
            ValueError: Another format; or a value is missing, or of the wrong kind.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"format is {record.get('format')!r}, this raycloud reads {FORMAT}")
        hints = get_type_hints(cls)
        known = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        values = {name: _checked(name, hints[name], value) for name, value in known.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Whose card it is: the name of the run, and its directory on its driver's machine."""

    run: str = ""
    directory: str = ""

    @classmethod
    def of(cls, directory: Path | None) -> Identity:
        """That of a run kept in `directory`, on this machine."""
        if directory is None:
            return cls()
        return cls(run=directory.absolute().name, directory=str(directory.absolute()))


def card_of(
    tally: Tally,
    *,
    now_t: float,
    unix_s: float | None = None,
    steps: int | None = None,
    identity: Identity | None = None,
) -> Card:
    """How the run of `tally` stands.

    Args:
        tally: What has happened.
        now_t: The present, by the clock that the tally's events were stamped with.
        unix_s: The present in unix seconds; None: `now_t` is that.
        steps: Steps of the whole job.
        identity: Whose card it is.
    """
    identity = identity or Identity()
    unix_s = now_t if unix_s is None else unix_s
    rate = rates.recent(tally)
    loss = tally.points[-1].loss if tally.points else math.nan
    left = max(0, (steps or 0) - tally.steps)
    saved_t = tally.checkpoint_t
    return Card(
        run=identity.run,
        job=tally.job,
        status=_status(tally),
        t=round(unix_s, 3),
        step=tally.steps,
        steps=steps,
        samples=tally.samples,
        loss=loss if math.isfinite(loss) else None,
        samples_per_s=rate[1] if rate else None,
        left_s=left / rate[0] if rate and left and rate[0] > 0 else None,
        workers=len(tally.members or tally.awaited),
        ready=len(tally.ready & tally.awaited),
        members=tally.members,
        shares=tally.shares,
        generation=tally.generation if tally.generation >= 0 else None,
        recoveries=len(tally.recoveries),
        **counts(tally.recoveries),
        bytes_sent=tally.spent.bytes_sent,
        checkpoint_step=tally.checkpoint.step if tally.checkpoint else None,
        checkpoint_t=None if saved_t is None else round(unix_s - (now_t - saved_t), 3),
        cost=rates.cost(tally, now_t),
        error=tally.error,
        directory=identity.directory,
    )


def _status(tally: Tally) -> str:
    if tally.status != "unfinished":
        return tally.status
    if tally.stop_reason is not None:
        return "stopping"
    return "running" if tally.members or tally.steps else "starting"


def _checked(name: str, hint: Any, value: Any) -> Any:
    """A value that came from a log: of the kind that the field has, and of a bearable size."""
    if isinstance(value, list):
        value = tuple(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or (isinstance(value, float) and math.isfinite(value))
    fits = {
        str: isinstance(value, str),
        int: whole,
        float: number,
        str | None: value is None or isinstance(value, str),
        int | None: value is None or whole,
        float | None: value is None or number,
        tuple[int, ...]: isinstance(value, tuple)
        and all(isinstance(x, int) and not isinstance(x, bool) for x in value),
    }
    if not fits[hint]:
        raise ValueError(f"{name} is {value!r}, which is of the wrong kind")
    return value[:_MOST_TEXT] if isinstance(value, str) else value
