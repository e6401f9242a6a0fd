"""The numbers of a run that a cluster's metrics port shows, for Prometheus. Knows no Ray.

Ray puts `ray_` before each name. All are gauges: what only grows is a sum over this start of
the run, and `rate()` works on it as on a counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.report.follow import total_steps
from raycloud.report.standing import Identity, card_of

if TYPE_CHECKING:
    from raycloud.report.standing import Card
    from raycloud.report.tally import Tally
    from raycloud.spec.job import Job

TAGS = ("job", "run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One number.

    Attributes:
        name: As Ray is told it.
        meaning: In one sentence, with its unit.
        tag: What it has beside the run's tags; empty: nothing.
    """

    name: str
    meaning: str
    tag: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A number of this moment; `of` is the tag's value, where its measure has a tag."""

    name: str
    value: float
    of: str = ""


_Look = Callable[["Tally", "Card"], float | None]

_TABLE: tuple[tuple[str, str, _Look], ...] = (
    ("step", "Steps that every member has committed.", lambda _, card: card.step),
    ("steps", "Steps of the whole job.", lambda _, card: card.steps),
    ("samples", "Samples committed in this start of the run.", lambda _, card: card.samples),
    ("loss", "Loss of the newest reported steps.", lambda _, card: card.loss),
    (
        "learning_rate",
        "Learning rate of the newest reported step.",
        lambda tally, _: tally.learning_rate,
    ),
    ("samples_per_s", "Samples per second, lately.", lambda _, card: card.samples_per_s),
    ("left_s", "Seconds until the last step, at that rate.", lambda _, card: card.left_s),
    ("workers", "Workers that compute.", lambda _, card: float(len(card.members))),
    ("generation", "Number of the generation.", lambda _, card: card.generation),
    ("recoveries", "Members lost, meetings anew, and resumes.", lambda _, card: card.recoveries),
    (
        "notices",
        "Notices in the log.",
        lambda tally, _: len(tally.notices) + tally.notices_left_out,
    ),
    ("checkpoint_step", "Step of the newest checkpoint.", lambda _, card: card.checkpoint_step),
    (
        "checkpoint_unix_s",
        "When the newest checkpoint was published, in unix seconds.",
        lambda _, card: card.checkpoint_t,
    ),
    ("cost", "Cost so far, in the currency of the nodes' labels.", lambda _, card: card.cost),
    ("bytes_sent", "Bytes sent for the exchange of gradients.", lambda _, card: card.bytes_sent),
    ("compute_s", "Seconds of computing, of all members.", lambda tally, _: tally.spent.compute_s),
    (
        "data_wait_s",
        "Seconds of waiting for data, of all members.",
        lambda tally, _: tally.spent.data_s,
    ),
    (
        "exchange_wait_s",
        "Seconds of waiting for the exchange, of all members.",
        lambda tally, _: tally.spent.exchange_s,
    ),
)

_SHARE = Measure(
    name="raycloud_member_share", meaning="Micro-batches per step of a member.", tag="member"
)
_SECONDS = Measure(
    name="raycloud_member_compute_s",
    meaning="Seconds of computing of a member, in this start of the run.",
    tag="member",
)
_HELD_OUT = Measure(
    name="raycloud_held_out", meaning="Measures of the held-out samples.", tag="measure"
)

MEASURES: tuple[Measure, ...] = (
    *(Measure(name=f"raycloud_{name}", meaning=meaning) for name, meaning, _ in _TABLE),
    _SHARE,
    _SECONDS,
    _HELD_OUT,
)


def values(tally: Tally, job: Job, identity: Identity, now_t: float) -> Iterator[Value]:
    """Every number that is known now.

    Args:
        tally: Of the run.
        job: What is asked.
        identity: Whose numbers they are.
        now_t: Unix seconds.
    """
    steps = total_steps(job, tally.epoch_samples)
    card = card_of(tally, now_t=now_t, steps=steps, identity=identity)
    for name, _, look in _TABLE:
        found = look(tally, card)
        if found is not None and math.isfinite(found):
            yield Value(name=f"raycloud_{name}", value=float(found))
    for member, share in zip(card.members, card.shares, strict=False):
        yield Value(name=_SHARE.name, value=float(share), of=str(member))
        if member in tally.computed:
            yield Value(name=_SECONDS.name, value=tally.computed[member][0], of=str(member))
    for measure, value in tally.metrics.items():
        if math.isfinite(value):
            yield Value(name=_HELD_OUT.name, value=float(value), of=measure)
