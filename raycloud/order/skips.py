"""Samples that a step took and that did not count in it: never silently, see `Ledger.skip`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from raycloud.order.commits import SampleRange

if TYPE_CHECKING:
    from collections.abc import Mapping

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
