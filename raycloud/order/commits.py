"""Commits and skips: what is written down of samples, and what an audit says of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.order.steps import Position, Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Samples [start, stop) of `epoch` counted with the updates of steps [first_step, last_step).

    Attributes:
        generation: Who computed them.
        epochs: The same range of this many epochs, from `epoch` on.
        left_out: Samples after `stop` that no step will take (`drop_last`).
    """

    first_step: int
    last_step: int
    epoch: int
    start: int
    stop: int
    generation: int
    epochs: int = 1
    left_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SampleRange:
    """Samples [start, stop) of each of `epochs` epochs from `epoch` on."""

    epoch: int
    start: int
    stop: int
    epochs: int = 1

    @property
    def samples(self) -> int:
        """Number of samples."""
        return (self.stop - self.start) * self.epochs

    def __str__(self) -> str:
        """As people read it.

        >>> str(SampleRange(epoch=2, start=0, stop=8))
        'epoch 2 [0, 8)'
        """
        last = self.epoch + self.epochs - 1
        which = f"epoch {self.epoch}" if self.epochs == 1 else f"epochs {self.epoch} to {last}"
        return f"{which} [{self.start}, {self.stop})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What a ledger says about the samples before `through`.

    Attributes:
        through: Every sample before this position is asked for.
        committed_samples: Samples that counted.
        missing: Before `through`, yet neither committed nor left out.
        doubled: Committed more than once.
        left_out: Left out on purpose (`drop_last`).
        skips: Taken by a step, in which they did not count.
    """

    through: Position
    committed_samples: int
    missing: tuple[SampleRange, ...]
    doubled: tuple[SampleRange, ...]
    left_out: tuple[SampleRange, ...]
    skips: tuple[Skip, ...] = ()

    @property
    def exact(self) -> bool:
        """Each sample counted exactly once, or is named as skipped."""
        return not self.missing and not self.doubled

    def __str__(self) -> str:
        """One line, naming every range that is wrong."""
        parts = [f"{self.committed_samples} samples committed"]
        for name in ("missing", "doubled", "left_out"):
            found: tuple[SampleRange, ...] = getattr(self, name)
            if found:
                ranges = ", ".join(str(r) for r in found)
                parts.append(f"{sum(r.samples for r in found)} {name.replace('_', ' ')}: {ranges}")
        if self.skips:
            parts.append(f"skipped: {', '.join(map(str, self.skips))}")
        return "; ".join(parts)


def lockstep_commits(
    steps: Steps, *, at: Position, first_step: int, last_step: int, generation: int
) -> tuple[Commit, ...]:
    """The ranges that steps [first_step, last_step) take when the sequence stands at `at`.

    At most four, however many steps and epochs there are: the tail that is left out before the
    first step, the rest of an epoch, whole epochs, the start of an epoch. Each growth of the data
    on the way adds one more run of whole epochs.

    >>> from raycloud.order import Position, Steps
    >>> steps = Steps(samples=10, global_batch=4, micro_batch=2, drop_last=True)
    >>> for c in lockstep_commits(steps, at=Position(), first_step=0, last_step=5, generation=1):
    ...     print(c.first_step, c.last_step, c.epoch, c.epochs, c.start, c.stop, c.left_out)
    0 4 0 2 0 8 2
    4 5 2 1 0 4 0
    """
    commits: list[Commit] = []
    if first_step >= last_step:
        return ()
    begin = steps.position_after(0, at)
    while at.epoch < begin.epoch:
        if (tail := steps.samples_in(at.epoch) - at.offset) > 0:
            nothing = Commit(
                first_step=first_step,
                last_step=first_step,
                epoch=at.epoch,
                start=at.offset,
                stop=at.offset,
                generation=generation,
                left_out=tail,
            )
            commits.append(nothing)
        at = replace(at, epoch=at.epoch + 1, offset=0)
    step, here = first_step, begin
    while step < last_step:
        samples = steps.samples_in(here.epoch)
        per_epoch = steps.until_epoch(here.epoch + 1, here)
        epochs = 1 if here.offset else max(1, (last_step - step) // per_epoch)
        grows = steps.sizes.next_growth(here.epoch)
        epochs = epochs if grows is None else min(epochs, grows - here.epoch)
        taken = min(last_step - step, per_epoch * epochs)
        stop = min(here.offset + min(taken, per_epoch) * steps.global_batch, samples)
        taking = Commit(
            first_step=step,
            last_step=step + taken,
            epoch=here.epoch,
            start=here.offset,
            stop=stop,
            generation=generation,
            epochs=epochs,
            left_out=samples - stop if taken == per_epoch * epochs else 0,
        )
        commits.append(taking)
        step, here = step + taken, replace(here, epoch=here.epoch + epochs, offset=0)
    return tuple(commits)


ERROR: Final = "error"  # it failed each time it was computed, or whoever computed it was lost
NAN: Final = "nan"  # loss or gradient of the step were not finite
_WHY = frozenset({ERROR, NAN})


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Skip:
    """Samples [start, stop) of `epoch`, which `step` took and did not count; `why` is a word."""

    step: int
    epoch: int
    start: int
    stop: int
    why: str

    @property
    def range(self) -> SampleRange:
        """Which samples."""
        return SampleRange(epoch=self.epoch, start=self.start, stop=self.stop)

    @property
    def whole_step(self) -> bool:
        """The step changed nothing; else it has the mean of its other samples."""
        return self.why == NAN

    def __str__(self) -> str:
        """As people read it.

        >>> str(Skip(step=12, epoch=1, start=8, stop=16, why=ERROR))
        'epoch 1 [8, 16), step 12, error'
        """
        return f"{self.range}, step {self.step}, {self.why}"

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def skip_of(record: Mapping[str, Any]) -> Skip:
    """The skip whose `to_record` this is.

    Raises:
        ValueError: It is of no skip.
    """
    known = {field.name for field in fields(Skip)}
    if not isinstance(record, dict) or record.keys() != known:
        raise ValueError(f"a skip has {', '.join(sorted(known))}, not {record!r:.80}")
    numbers = [record[name] for name in known - {"why"}]
    if not all(type(n) is int and n >= 0 for n in numbers) or record["why"] not in _WHY:
        raise ValueError(f"not the values of a skip: {record!r:.200}")
    skip = Skip(**record)
    if skip.start >= skip.stop:
        raise ValueError(f"a skip of no samples: {skip}")
    return skip
