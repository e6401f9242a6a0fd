"""A reader: what makes blocks in a process, and takes one after the other."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from raycloud.clock import SystemClock
from raycloud.data.prepare import Share, compacted, make_block, make_partition, plan_table
from raycloud.errors import MachineError, RaycloudError
from raycloud.on_ray.confidential import keep_confidential
from raycloud.on_ray.holder import cache_of
from raycloud.on_ray.holders import Reach
from raycloud.step.contract import construct

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

    from raycloud.data.index import Block, Input
    from raycloud.data.prepare import Made, Recipe, Work
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Task

_KEPT = 4  # what a reader's process remembers
ANY = -1  # a task that takes numbers in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    """What readers must know of a split. It travels once to each process.

    Attributes:
        job: The job.
        task: The task's class, or its code.
        recipe: Of the split.
        works: What there is to make; their tables, if any, are in `tables`.
        tables: By the number of a work, its rows in the object store.
        shares: Of a stratified split, the partitions to make of the blocks of `works`.
        blocks: And those blocks.
        handles: By node, the holders.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    job: Job
    recipe: Recipe
    works: Sequence[Work] = ()
    tables: Mapping[int, ObjectRef[Any]] = field(default_factory=dict)
    shares: Sequence[Share] = ()
    blocks: Sequence[Block] = ()
    handles: Mapping[str, Any] = field(default_factory=dict)


def brief_works(brief: Brief, works: Sequence[Work], numbers: Sequence[int]) -> Brief:
    """The brief with these works; the rows in hand of those in `numbers` go into the store."""
    tables = {
        number: ray.put(compacted(table))
        for number in numbers
        if (table := works[number].table) is not None
    }
    return replace(brief, works=[replace(work, table=None) for work in works], tables=tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMade:
    """What a reader made of one block of a `ray.data.Dataset`."""

    inputs: tuple[Input, ...]
    works: tuple[Work, ...]
    made: tuple[Made, ...]


class Reader:
    """What makes blocks in a reader's process."""

    def __init__(self, brief: Brief) -> None:
        """Make the task."""
        keep_confidential(brief.job)
        self._brief = brief
        self._task = construct(brief.task, brief.job)
        self._cache = cache_of(brief.job)
        self._clock = SystemClock()
        self._node = ray.get_runtime_context().get_node_id()

    def make(self, number: int) -> Made:
        """The block of a work."""
        brief = self._brief
        work = brief.works[number]
        if number in brief.tables:
            work = replace(work, table=ray.get(brief.tables[number]))
        return self._made(work)

    def deal(self, number: int) -> Block:
        """The block of a share."""
        brief = self._brief
        share = brief.shares[number]
        reach = Reach(self._cache, self._node, brief.handles, lambda *_, **__: None)
        pieces = (self._rows(reach, brief.blocks[n]).take(rows) for n, rows in share.rows.items())
        return make_partition(share, pieces, self._cache, self._node)

    def table(self, table: pa.Table) -> TableMade:
        """The blocks of a table, which is known by its content alone."""
        recipe = self._brief.recipe
        inputs, works = plan_table(replace(recipe, source=replace(recipe.source, key=None)), table)
        made = tuple(self._made(work) for work in works)
        bare = tuple(replace(work, table=None) for work in works)
        return TableMade(inputs=inputs, works=bare, made=made)

    def _made(self, work: Work) -> Made:
        recipe, cache, clock = self._brief.recipe, self._cache, self._clock
        return make_block(recipe, work, self._task, cache, clock, self._node)

    def _rows(self, reach: Reach, block: Block) -> pa.Table:
        table = reach.table(block)
        if table is None:
            raise MachineError(
                f"the block {block.key} is on no node any more", hint="start the run again"
            )
        return table


_readers: OrderedDict[str, Reader] = OrderedDict()
_lock = Lock()


def reader_of(brief: ObjectRef[Any]) -> Reader:
    """This process's reader for a brief."""
    name = brief.hex()
    with _lock:
        if name not in _readers:
            _readers[name] = Reader(ray.get(brief))
        _readers.move_to_end(name)
        while len(_readers) > _KEPT:
            _readers.popitem(last=False)
        return _readers[name]


def numbered(
    rows: Any, *, brief: list[ObjectRef[Any]], method: str, taking: tuple[Any, str]
) -> Iterator[dict[str, Any]]:
    """Makes what a row says; or, of a row that says nothing, whatever is left to be taken."""
    actor, ticket = taking
    own = int(rows["number"][0])
    number = own if own >= 0 else ray.get(actor.take.remote(ticket))
    while number is not None:
        made = _alone(brief[0], method, number)
        yield {"number": np.array([number]), "made": made}
        if own >= 0 or isinstance(made[0], RaycloudError):
            return
        number = ray.get(actor.take.remote(ticket))


def tabled(table: Any, *, brief: list[ObjectRef[Any]]) -> dict[str, Any]:
    """What `Reader.table` makes of a table."""
    if not len(table):
        return {"made": np.empty(0, dtype=object)}
    return {"made": _alone(brief[0], "table", table)}


def _alone(brief: ObjectRef[Any], method: str, argument: Any) -> np.ndarray[Any, Any]:
    """What a reader makes, or the error of ours, as a column of one row."""
    column = np.empty(1, dtype=object)
    try:
        column[0] = getattr(reader_of(brief), method)(argument)
    except RaycloudError as error:
        column[0] = error
    return column


class Turns:
    """What there is to make, taken by whichever reader is free: slow ones take less. Thread-safe.

    Args:
        actor: That of this process; its method `take` calls `take`.
    """

    def __init__(self, actor: Any) -> None:
        """Nothing is to be made."""
        self.actor = actor
        self._left: dict[str, list[int]] = {}

    @contextmanager
    def of(self, numbers: Sequence[int]) -> Iterator[str]:
        """Hand out these numbers; yields by what they are asked for."""
        ticket = secrets.token_hex(8)
        self._left[ticket] = list(reversed(numbers))
        try:
            yield ticket
        finally:
            del self._left[ticket]

    def take(self, ticket: str) -> int | None:
        """The next number; None: there is none left."""
        try:
            return self._left[ticket].pop()
        except (IndexError, KeyError):
            return None
