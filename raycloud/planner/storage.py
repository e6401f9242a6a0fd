"""What storage takes: seconds and money to read a source, and to keep blocks and checkpoints.

    reading all of it     files * latency_s / readers + bytes / bytes_per_s
    money, each time      bytes * per_gb + files * per_1000_requests / 1000
    money, kept           bytes * per_gb_month * months

Blocks of rows are kept on nodes' disks, so that a source is read once. Reading it again in each
epoch would go on beside computing, and the run would wait for what the computing of an epoch does
not hide. Which of the two costs less, nodes that wait included, is what `weigh` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.spec.sections import KeepingPrices, ReadingPrices
    from raycloud.spec.sizes import SourceRate

_GB = 1e9
_MONTH_S = 730 * 3600.0  # a twelfth of a year, as stores bill it
_FASTER, _SLOWER = 0.8, 1.2  # by what a sample of seconds is taken to be off at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """Prices that are known; None: not this one.

    Attributes:
        reading: The source, by whoever keeps it.
        disk_per_gb_month: Of the cache's disk.
        nodes_per_hour: Of the nodes that wait while it is read.
    """

    reading: ReadingPrices | None = None
    disk_per_gb_month: float | None = None
    nodes_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is predicted of reading a source, and of reading it again.

    Attributes:
        source: Where the rows come from, without credentials.
        files: How many there are.
        bytes: All of them.
        read_s: To read them once.
        low_s: It is likely from here.
        high_s: To here.
        epochs: That the job makes of them.
        read_cost: Money for reading once; None: `data.prices` is not given.
        cache_cost: Of blocks, as large as the source, on one disk while the job runs; None:
            `data.cache.price_per_gb_month` is not given.
        again_s: That the run would wait if it read all again in each epoch, the first included.
        again_cost: Money for that reading; None as `read_cost`.
        keeps: Whether keeping blocks costs no more, by all that is known.
    """

    source: str
    files: int
    bytes: int
    read_s: float
    low_s: float
    high_s: float
    epochs: float
    read_cost: float | None
    cache_cost: float | None
    again_s: float
    again_cost: float | None
    keeps: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What a plan says of storage.

    Attributes:
        reading: Of the source; None: it is on this machine, or could not be sampled.
        why: That it could not.
        checkpoints_month: Money a month for the checkpoints that stay; None: `checkpoint.prices`
            is not given.
        checkpoint_each: Money for writing one; likewise.
    """

    reading: Reading | None = None
    why: str = ""
    checkpoints_month: float | None = None
    checkpoint_each: float | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Storage:
        """The inverse of `dataclasses.asdict`."""
        found = record.get("reading")
        return cls(**{**record, "reading": None if found is None else Reading(**found)})

    def rows(self) -> list[dict[str, Any]]:
        """One row for each way, for a table; money in the currency of the prices."""
        rows: list[tuple[str, float | None, float | None, str]] = []
        if (one := self.reading) is not None:
            likely = f"likely {one.low_s:.3g} to {one.high_s:.3g}"
            kept = _sum(one.read_cost, one.cache_cost)
            again = "" if one.keeps else "would cost less"
            rows.append((f"read {one.source} once, keep blocks", one.read_s, kept, likely))
            what = f"read it in each of {one.epochs:.3g} epochs"
            rows.append((what, one.again_s, one.again_cost, again))
        if self.why:
            rows.append(("reading the source", None, None, self.why))
        if self.checkpoints_month is not None:
            rows.append(("checkpoints that stay, a month", None, self.checkpoints_month, ""))
            rows.append(("writing one", None, self.checkpoint_each, ""))
        names = ("storage", "waited_s", "cost", "note")
        return [dict(zip(names, row, strict=True)) for row in rows]


def read_cost(prices: ReadingPrices, files: int, size: int) -> float:
    """Money for reading so many files once.

    >>> from raycloud.spec.sections import ReadingPrices
    >>> read_cost(ReadingPrices(per_gb=0.09, per_1000_requests=0.4), 5000, 2 * 10**9)
    2.18
    """
    return size / _GB * prices.per_gb + files * prices.per_1000_requests / 1000


def kept_cost(per_gb_month: float, size: int, seconds: float) -> float:
    """Money for keeping so many bytes for so long.

    >>> kept_cost(0.02, 10**12, 730 * 3600)
    20.0
    """
    return size / _GB * per_gb_month * seconds / _MONTH_S


def weigh(
    source: str,
    rate: SourceRate,
    paid: Paid,
    *,
    epochs: float,
    job_s: float,
    nodes: int = 1,
) -> Reading:
    """What reading a source takes, and whether its rows are better kept or read again.

    Money decides where what reading and what nodes cost is known; a disk of no price costs nothing.
    Else rows are kept: no way is sooner.

    Args:
        source: Its name.
        rate: As sampled on one node.
        paid: What is known of prices.
        epochs: That the job makes of it, 1 at least.
        job_s: Seconds of all steps.
        nodes: That read it: where each has a link of its own, they take as much less together.

    >>> from raycloud.spec.sizes import SourceRate
    >>> rate = SourceRate(files=1, bytes=60_000_000, latency_s=0.0, bytes_per_s=1e6, readers=1)
    >>> one = weigh("s3://b", rate, Paid(), epochs=10.0, job_s=300.0)
    >>> one.read_s, one.again_s, one.keeps
    (60.0, 330.0, True)
    """
    files, size, read_s = rate.files, rate.bytes, rate.seconds()
    epochs = max(1.0, epochs)
    again_s = read_s + (epochs - 1.0) * max(0.0, read_s - job_s / epochs)
    once = None if paid.reading is None else read_cost(paid.reading, files, size)
    again = None if once is None else once * epochs
    disk = paid.disk_per_gb_month
    cache = None if disk is None else kept_cost(disk, size, job_s)
    keeps = True
    if once is not None and again is not None and paid.nodes_per_hour is not None:
        waiting = paid.nodes_per_hour / 3600
        keeps = once + (cache or 0.0) + read_s * waiting <= again + again_s * waiting
    return Reading(
        source=source,
        files=files,
        bytes=size,
        read_s=read_s,
        low_s=_FASTER * read_s / nodes,
        high_s=_SLOWER * read_s,
        epochs=epochs,
        read_cost=once,
        cache_cost=cache,
        again_s=again_s,
        again_cost=again,
        keeps=keeps,
    )


def checkpoints_cost(
    prices: KeepingPrices, state_bytes: int, keep: int, parts: int
) -> tuple[float, float]:
    """Money a month for the checkpoints that stay, and for writing one of so many files.

    >>> from raycloud.spec.sections import KeepingPrices
    >>> checkpoints_cost(KeepingPrices(per_gb_month=0.5, per_1000_requests=5.0), 10**9, 2, 4)
    (1.0, 0.02)
    """
    month = kept_cost(prices.per_gb_month, keep * state_bytes, _MONTH_S)
    return month, parts * prices.per_1000_requests / 1000


def _sum(*parts: float | None) -> float | None:
    known = [one for one in parts if one is not None]
    return sum(known) if known else None
