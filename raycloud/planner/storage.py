"""What storage takes: seconds and money to read a source, and to keep blocks and checkpoints.

    reading all of it     files * latency_s / readers + bytes / bytes_per_s
    money, each time      bytes * per_gb + files * per_1000_requests / 1000
    money, kept           bytes * per_gb_month * months

Blocks of rows are kept on nodes' disks, so that a source is read once. Reading it again in each
epoch would go on beside computing, and the run would wait for what the computing of an epoch does
not hide. Which of the two costs less, nodes that wait included, is what `weigh` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.spec.sections import PricesSection

_GB = 1e9
_MONTH_S = 730 * 3600.0  # a twelfth of a year, as stores bill it
_FASTER, _SLOWER = 0.85, 1.2  # by what a sample of seconds is taken to be off at most


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRate:
    """How fast a source was read, by some of its files.

    Attributes:
        files: How many there are.
        bytes: All of them.
        latency_s: From asking for a file until its first byte is there.
        bytes_per_s: Of all readers together, once files are open.
        readers: That read at once.
    """

    files: int
    bytes: int
    latency_s: float
    bytes_per_s: float
    readers: int

    def seconds(self) -> float:
        """Of reading all of it once.

        >>> rate = SourceRate(files=20, bytes=8_000_000, latency_s=0.1, bytes_per_s=1e6, readers=2)
        >>> rate.seconds()
        9.0
        """
        return self.files * self.latency_s / self.readers + self.bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """Prices that are known; None: not this one.

    Attributes:
        reading: The source, by whoever keeps it.
        disk_per_gb_month: Of the cache's disk.
        nodes_per_hour: Of the nodes that wait while it is read.
    """

    reading: PricesSection | None = None
    disk_per_gb_month: float | None = None
    nodes_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What is predicted of a job's storage.

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
        keeps: Whether keeping blocks costs no more than reading again.
        checkpoints_cost: Of those that stay, a month, and of writing all; None: `checkpoint.prices`
            is not given.
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
    checkpoints_cost: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row for each way, for a table; money in the currency of the prices."""
        likely = f"likely {self.low_s:.3g} to {self.high_s:.3g}"
        kept = _sum(self.read_cost, self.cache_cost)
        rows = [
            {"storage": f"read {self.source} once, keep blocks", "waited_s": self.read_s}
            | {"cost": kept, "note": likely},
            {"storage": f"read it in each of {self.epochs:.3g} epochs", "waited_s": self.again_s}
            | {"cost": self.again_cost, "note": "" if self.keeps else "would cost less"},
        ]
        if self.checkpoints_cost is not None:
            rows.append(
                {"storage": "checkpoints, a month", "waited_s": None}
                | {"cost": self.checkpoints_cost, "note": ""}
            )
        return rows


def read_cost(prices: PricesSection, files: int, size: int) -> float:
    """Money for reading so many files once.

    >>> from raycloud.spec.sections import PricesSection
    >>> read_cost(PricesSection(per_gb=0.09, per_1000_requests=0.4), 5000, 2 * 10**9)
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
) -> Storage:
    """What reading a source takes, and whether its rows are better kept or read again.

    Without a price of nodes, seconds decide; and they do between ways of the same price.

    Args:
        source: Its name.
        rate: As sampled on one node.
        paid: What is known of prices.
        epochs: That the job makes of it, 1 at least.
        job_s: Seconds of all steps.
        nodes: That read it: where each has a link of its own, they take as much less together.

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
    waiting = (paid.nodes_per_hour or 0.0) / 3600
    keeping = (_sum(once, cache) or 0.0) + read_s * waiting
    reading = (again or 0.0) + again_s * waiting
    return Storage(
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
        keeps=(keeping, read_s) <= (reading, again_s),
    )


def checkpoints_cost(prices: PricesSection, state_bytes: int, keep: int, requests: int) -> float:
    """Money a month for the checkpoints that stay, and once for writing so many files.

    >>> from raycloud.spec.sections import PricesSection
    >>> checkpoints_cost(PricesSection(per_gb_month=0.5), 10**9, 2, 100)
    1.0
    """
    kept = kept_cost(prices.per_gb_month, keep * state_bytes, _MONTH_S)
    return kept + requests * prices.per_1000_requests / 1000


def _sum(*parts: float | None) -> float | None:
    known = [one for one in parts if one is not None]
    return sum(known) if known else None
