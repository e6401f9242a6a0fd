"""How a data set is laid out for reading: partitions, dealt to lanes, mixed inside windows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

MOST_LANES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a shuffle must know of a data set to keep its reads together.

    An epoch is a sequence of rounds. A round takes `run` rows of each lane in turn. A lane owns the
    same partitions in every epoch, so whoever computes its rows reads the same part of the data
    set. Each epoch permutes a lane's partitions anew, and mixes the rows of `window` partitions
    that follow each other. Lanes of unequal length drop out of the rounds once they have less than
    a run left; that follows at the end, lane by lane.

    With `lanes_of` lanes and `run = global_batch // lanes`, a round of all lanes is a step, and
    micro-batch k of every step comes from the same lane, until the shortest lane drops out.

    Attributes:
        partitions: The first row of each partition, and one past the last row: P + 1 numbers,
            never falling. A partition may be empty.
        lanes: How many lanes the partitions are dealt to; P is a multiple of it.
        run: Rows that a lane gives at a time.
        window: Partitions of one lane whose rows are mixed with each other.
    """

    partitions: tuple[int, ...]
    lanes: int
    run: int
    window: int

    def __post_init__(self) -> None:
        """Refuse a layout that cannot be dealt.

        Raises:
            ValueError: Names the field, its value and what would do.
        """
        for name in ("lanes", "run", "window"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        starts = self.partitions
        if len(starts) < 2 or starts[0] != 0:  # noqa: PLR2004 (one partition has two ends)
            raise ValueError(
                f"partitions must begin with 0 and end with the number of rows, got {starts[:4]}"
            )
        for p, (start, stop) in enumerate(pairwise(starts)):
            if stop < start:
                raise ValueError(
                    f"partitions must not fall: partition {p} begins at row {start} and the next "
                    f"at {stop}"
                )
        if self.count % self.lanes:
            raise ValueError(
                f"{self.count} partitions cannot be dealt evenly to lanes={self.lanes}: cut the "
                f"data set into a multiple of {self.lanes}"
            )

    @property
    def count(self) -> int:
        """Number of partitions."""
        return len(self.partitions) - 1

    @property
    def samples(self) -> int:
        """Rows of all partitions."""
        return self.partitions[-1]


def lanes_of(global_batch: int, micro_batch: int) -> int:
    """How many lanes a step reads from: the most, up to 64, that share its micro-batches equally.

    >>> lanes_of(128, 16), lanes_of(1024, 8), lanes_of(71, 1)
    (8, 64, 1)

    Raises:
        ValueError: The step is not a whole number of micro-batches.
    """
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise ValueError(
            f"global_batch={global_batch} must be a positive multiple of micro_batch={micro_batch}"
        )
    count = global_batch // micro_batch
    return next(n for n in range(min(count, MOST_LANES), 0, -1) if count % n == 0)
