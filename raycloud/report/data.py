"""Data of a run: how it was prepared, what reading it takes, and what keeping it costs.

Every member reports the preparation, which was done once: the first report of a split's version
counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.events import DataPrepared, StepsCommitted

_BYTES_PER_GB = 1e9


def storage_efficiency(*, data_bytes: float, access_s: float, cost: float) -> float:
    """E = D / (T_access · C_storage), in gigabytes per second and unit of cost.

    D is the amount of data that is stored, T_access the seconds it takes to access all of it once,
    and C_storage what storing it costs: the measure by which papers on caching training data
    compare ways to store it. Here T_access is what all members together spend reading an epoch's
    samples out of the cache, and C_storage the cost of D on the cache's disk for a month. E does
    not grow with D: twice the data takes twice as long and costs twice as much, which halves it.

    200 GB that are read in 50 s and cost 4 a month:

    >>> storage_efficiency(data_bytes=200e9, access_s=50.0, cost=4.0)
    1.0
    """
    return data_bytes / _BYTES_PER_GB / (access_s * cost)


def brief(event: DataPrepared) -> DataPrepared:
    """The same without the records of the files, which may be many: for the log."""
    return replace(event, inputs=(), files=max(event.files, len(event.inputs)))


@dataclass(slots=True)
class Split:
    """A split as it is now; `made_blocks`, `seconds` and `read_s` add up as it grows."""

    rows: int
    bytes: int
    blocks: int
    cached_blocks: int
    made_blocks: int
    partitions: int
    files: int
    bad_rows: int
    bad: tuple[str, ...]
    seconds: float
    read_s: float
    version: int

    def to_record(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "bad": list(self.bad)}


@dataclass(eq=False)
class DataTally:
    """The state of a run's data.

    Attributes:
        cold_data_s: In the first epoch of each session, as is `cold_wall_s`.
        waited_s: Of all members, until the data was prepared.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    read_s: float = 0.0
    collate_s: float = 0.0
    cold_data_s: float = 0.0
    cold_wall_s: float = 0.0
    waited_s: float = 0.0
    _price: float | None = None  # of a gigabyte and month
    _first_epoch: int | None = None  # of this session

    def start(self) -> None:
        """Begin a session, which prepares its data again."""
        self.splits.clear()
        self._first_epoch = None

    def prepare(self, event: DataPrepared) -> bool:
        """Take in a member's report of a split; whether it is new."""
        self.waited_s += event.waited_s
        known = self.splits.get(event.split)
        if known is not None and event.version <= known.version:
            return False
        self._price = event.price_per_gb_month
        self.splits[event.split] = Split(
            rows=event.rows,
            bytes=event.bytes,
            blocks=event.blocks,
            cached_blocks=known.cached_blocks if known else event.cached_blocks,
            made_blocks=event.blocks - event.cached_blocks + (known.made_blocks if known else 0),
            partitions=event.partitions,
            files=max(event.files, len(event.inputs)),
            bad_rows=event.bad_rows,
            bad=event.bad,
            seconds=event.seconds + (known.seconds if known else 0.0),
            read_s=event.read_s + (known.read_s if known else 0.0),
            version=event.version,
        )
        return True

    def commit(self, event: StepsCommitted, epoch_samples: int) -> None:
        """Take in a member's report; part of it may lie after the session's first epoch."""
        self.read_s += event.read_s
        self.collate_s += event.collate_s
        if self._first_epoch is None:
            self._first_epoch = event.epoch if event.offset else event.epoch - 1
        epochs = event.epoch - self._first_epoch
        samples = event.offset + (epochs - 1) * epoch_samples if epochs > 0 else 0
        cold = 1.0 - min(1.0, samples / event.samples) if event.samples else 1.0
        self.cold_data_s += cold * event.data_s
        self.cold_wall_s += cold * event.wall_s

    def to_record(self, *, samples: int, epoch_samples: int) -> dict[str, Any]:
        """Plain values; none where no data was prepared.

        By split what the latest session prepared; the `bytes` on disk of all splits, `access_s` of
        reading one epoch out of the cache, `access_s_per_gb` of it, `cost_per_month` where a price
        is given, and `efficiency` (see `storage_efficiency`).

        Args:
            samples: That `read_s` was spent on.
            epoch_samples: Samples of an epoch.
        """
        if not self.splits:
            return {}
        stored = sum(split.bytes for split in self.splits.values())
        trained = self.splits.get("train")
        access_s = self.read_s * epoch_samples / samples if samples else None
        cost = None if self._price is None else self._price * stored / _BYTES_PER_GB
        efficiency = per_gb_s = None
        if trained is not None and trained.bytes and access_s:
            per_gb_s = access_s * _BYTES_PER_GB / trained.bytes
            if self._price:
                efficiency = storage_efficiency(
                    data_bytes=trained.bytes,
                    access_s=access_s,
                    cost=self._price * trained.bytes / _BYTES_PER_GB,
                )
        return {
            "splits": {name: split.to_record() for name, split in self.splits.items()},
            "bytes": stored,
            "access_s": access_s,
            "access_s_per_gb": per_gb_s,
            "cost_per_month": cost,
            "efficiency": efficiency,
        }
