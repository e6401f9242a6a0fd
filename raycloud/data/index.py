"""Index of a data set: which blocks hold which rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A file that rows were read from.

    Attributes:
        digest: That of its content, or of what its store says about it.
        version: 0, or the number of the growth of the data set that brought it.
        modified_ns: When it was last written to, as it was found; None where that is not known.
    """

    path: str
    bytes: int
    digest: str
    version: int = 0
    modified_ns: int | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A file of rows in the cache.

    `key` is its name there: a digest of all that it was made from, so that equal keys hold equal
    rows. `nodes` are the ids of the nodes that held it when the index was made.
    """

    key: str
    rows: int
    bytes: int
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used: its file, its number there (the first is 0), and why."""

    file: str
    row: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Blocks in the order of their rows: row r of the data set is the sample with id r.

    Attributes:
        partitions: The first row of each partition, and one past the last row: P + 1 numbers,
            rising. A partition is what an epoch permutes; it may lie across blocks.
        inputs: What the rows were read from, in order.
        bad: The first of the `bad_rows` that were left out.
    """

    blocks: tuple[Block, ...]
    partitions: tuple[int, ...]
    inputs: tuple[Input, ...] = ()
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return sum(block.rows for block in self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.bytes for block in self.blocks)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each block, and one past the last row."""
        return tuple(accumulate((block.rows for block in self.blocks), initial=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """How one split was made ready, from looking for files to the last block.

    Blocks of its index were cached already, or made. `read_s` is how long all readers together
    waited for their source.
    """

    index: Index
    cached_blocks: int
    made_blocks: int
    seconds: float
    read_s: float
