"""Measures that can be merged: each worker measures its part, and the parts make the whole.

A mean of AUCs is not an AUC. So a metric is a value that holds enough to be merged exactly, and
says what it comes to only at the end.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

__all__ = ["Accuracy", "Auc", "Mean", "Metric", "merge_all"]

_KINDS: dict[str, type[Metric]] = {}
_MINUS_ZERO = 1 << 31  # the bits of -0.0, which equals 0.0


class Metric(ABC):
    """A mergeable measure. Subclasses name themselves in `kind` and are known by it afterwards."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        """Register the kind, so that a state written by a worker can be read by the driver."""
        super().__init_subclass__()
        _KINDS[cls.kind] = cls

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The measure of both parts together; neither part changes."""

    @abstractmethod
    def value(self) -> float:
        """What the measure comes to; NaN where nothing was measured."""

    def to_values(self) -> dict[str, Any]:
        """The state as plain JSON-ready values: the fields of a dataclass."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_values`."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def state(self) -> dict[str, Any]:
        """Kind and values, for `from_state`."""
        return {"kind": self.kind, **self.to_values()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Metric:
        """Rebuild a metric from `state`.

        Raises:
            ValueError: The kind is not known in this process.
        """
        kind = _KINDS.get(state["kind"])
        if kind is None:
            raise ValueError(
                f"unknown metric {state['kind']!r}; known: {', '.join(sorted(_KINDS))}"
            )
        return kind.from_values(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean(Metric):
    """A weighted mean: `total` is the sum of weight * value. Both may be what `float()` takes.

    >>> Mean(total=6.0, weight=3.0).merge(Mean(total=2.0, weight=1.0)).value()
    2.0
    """

    kind: ClassVar[str] = "mean"
    total: float
    weight: float

    def __post_init__(self) -> None:
        """Keep plain numbers: tensors and numpy's are taken as what they hold.

        Raises:
            ValueError: The weight is negative, or not finite.
        """
        object.__setattr__(self, "total", float(self.total))
        object.__setattr__(self, "weight", float(self.weight))
        if not 0.0 <= self.weight < math.inf:
            raise ValueError(f"Mean takes a finite weight >= 0, got {self.weight}")

    def merge(self, other: Mean) -> Mean:
        """Sum totals and weights."""
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def value(self) -> float:
        """Total over weight."""
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy(Metric):
    """The fraction that is right. Both may be whole numbers of any kind, also of numpy or torch.

    >>> Accuracy(right=3, count=4).merge(Accuracy(right=0, count=2)).value()
    0.5
    """

    kind: ClassVar[str] = "accuracy"
    right: int
    count: int

    def __post_init__(self) -> None:
        """Keep plain integers.

        Raises:
            ValueError: One is not a whole number.
        """
        for name in ("right", "count"):
            given = getattr(self, name)
            whole = int(given)
            if whole != given:
                raise ValueError(f"Accuracy takes whole numbers, got {name}={given}")
            object.__setattr__(self, name, whole)

    def merge(self, other: Accuracy) -> Accuracy:
        """Sum both counts."""
        return Accuracy(right=self.right + other.right, count=self.count + other.count)

    def value(self) -> float:
        """Right over count."""
        return self.right / self.count if self.count else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Auc(Metric):
    """Area under the ROC curve, from counts of positives and negatives per score.

    Scores are kept to the 16 leading bits of their float32 form, in order: 7 bits of mantissa, so
    two scores that differ by less than 1/128 of their size count as tied. Equals the probability
    that a positive scores above a negative, ties counting one half (Hanley and McNeil, Radiology
    1982).

    >>> Auc.of(scores=[0.1, 0.4, 0.35, 0.8], labels=[0, 0, 1, 1]).value()
    0.75
    """

    kind: ClassVar[str] = "auc"
    bins: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, *, scores: Iterable[float], labels: Iterable[float]) -> Auc:
        """Measure scores against labels (positive where the label is > 0.5)."""
        bins: dict[int, tuple[int, int]] = {}
        for score, label in zip(scores, labels, strict=True):
            negatives, positives = bins.get(key := _rank_bin(float(score)), (0, 0))
            positive = bool(label > 0.5)  # noqa: PLR2004
            bins[key] = (negatives + (not positive), positives + positive)
        return cls(bins=bins)

    def merge(self, other: Auc) -> Auc:
        """Sum the counts of each bin."""
        bins = dict(self.bins)
        for key, (negatives, positives) in other.bins.items():
            mine = bins.get(key, (0, 0))
            bins[key] = (mine[0] + negatives, mine[1] + positives)
        return Auc(bins=bins)

    def value(self) -> float:
        """The area; NaN where one of the classes is absent."""
        below, area, all_positives = 0, 0.0, 0
        for _, (negatives, positives) in sorted(self.bins.items()):
            area += positives * (below + negatives / 2)
            below += negatives
            all_positives += positives
        pairs = below * all_positives
        return area / pairs if pairs else float("nan")

    def to_values(self) -> dict[str, Any]:
        """Bins as [bin, negatives, positives] rows."""
        return {"bins": [[key, *counts] for key, counts in sorted(self.bins.items())]}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Auc:
        """From rows."""
        return cls(bins={int(k): (int(n), int(p)) for k, n, p in values["bins"]})


def _rank_bin(score: float) -> int:
    """The leading 16 bits of the float32, mapped so that they sort as the scores do."""
    try:
        packed = struct.pack(">f", score)
    except OverflowError:  # beyond float32
        packed = struct.pack(">f", math.copysign(math.inf, score))
    (bits,) = struct.unpack(">I", packed)
    bits = 0 if bits == _MINUS_ZERO else bits
    ordered = bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000
    return int(ordered >> 16)


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics by name over all parts, in the order given."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
