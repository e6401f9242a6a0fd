"""The index of a data set: which blocks hold which rows, and how rows are partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Self

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A file that rows were read from.

    Attributes:
        path: Where it is.
        bytes: Its size.
        digest: That of its content, or of what its store says about it.
        version: 0, or the number of the growth of the data set that brought it.
        modified_ns: When it was last written to, as it was found; None where that is not known. It
            spares looking whether the content is still the same, and says no more about it.
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
        blocks: The files, in order; together they hold every row once.
        partitions: The first row of each partition, and one past the last row: P + 1 numbers,
            rising. A partition is what an epoch permutes; it may lie across blocks.
        inputs: What the rows were read from, in order.
        bad_rows: How many rows were left out.
        bad: The first of them.
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

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild from `to_record`'s values.

        Raises:
            ValueError: Another format, or a value missing.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"an index of format {record.get('format')!r}, not {FORMAT}")
        try:
            return cls(
                blocks=tuple(Block(**{**b, "nodes": tuple(b["nodes"])}) for b in record["blocks"]),
                partitions=tuple(record["partitions"]),
                inputs=tuple(Input(**i) for i in record["inputs"]),
                bad_rows=record["bad_rows"],
                bad=tuple(BadRow(**b) for b in record["bad"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no index of format {FORMAT}: {error}") from error
