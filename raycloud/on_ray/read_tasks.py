"""Read tasks: blocks are made in a thread here, and as Ray Data's tasks on any node's CPUs.

Ray Data runs here beside members that have reserved every CPU, and without talk. It would wait for
a CPU that nobody gives back, and start two more processes, each of which takes as long to start as
a reader: one keeps statistics for Ray's dashboard, one asks its autoscaler for nodes. What is done
about that touches Ray's private parts, here alone: `ray.data._internal` of Ray 2.60.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from raycloud.clock import SystemClock
from raycloud.data.prepare import Share, make_block, make_partition
from raycloud.data.recipe import compacted, plan_table
from raycloud.errors import DataError, InternalError, MachineError, RaycloudError
from raycloud.on_ray.attach import keep_confidential
from raycloud.on_ray.block_store import BlockFetcher, cache_of
from raycloud.step.contract import construct

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

    from raycloud.clock import Clock
    from raycloud.data.index import Block, Input
    from raycloud.data.recipe import Made, Recipe, Work
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Task

_KEPT = 4  # what a reader's process remembers
ANY = -1  # a task that takes numbers in turn
_RETRIES = 3  # of a task whose process dies
_LOOK_S = 0.5  # after which it is foreseen how long all of it takes here
_START_S = 3.0  # CPU time that a process takes to start: torch, Ray Data and the task
_WAITING_START_S = 30.0  # to begin others for what is waited for, which they may hasten or not
_BUSY = 0.5  # of a processor that who reads takes: else it waits for the files' store
NumberedBlock = tuple[int, Any]
_CPUS = "raycloud.cpus"
_STATISTICS = (
    "register_dataset_to_stats_actor",
    "update_execution_metrics",
    "update_iteration_metrics",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSpec:
    """What readers must know of a split. It travels once to each process.

    Attributes:
        works: What there is to make; rows in hand are in `tables`, by number, in Ray's store.
        shares: Of a stratified split, the partitions to make of `blocks` instead.
        handles: By node, the actors that hold its blocks.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    job: Job
    recipe: Recipe
    works: Sequence[Work] = ()
    tables: Mapping[int, ObjectRef[Any]] = field(default_factory=dict)
    shares: Sequence[Share] = ()
    blocks: Sequence[Block] = ()
    handles: Mapping[str, Any] = field(default_factory=dict)


def with_works(spec: ReadSpec, works: Sequence[Work], numbers: Sequence[int]) -> ReadSpec:
    """The spec with these works; the rows in hand of those in `numbers` go into the store."""
    tables = {
        number: ray.put(compacted(table))
        for number in numbers
        if (table := works[number].table) is not None
    }
    return replace(spec, works=[replace(work, table=None) for work in works], tables=tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMade:
    """What a reader made of one block of a `ray.data.Dataset`."""

    input: Input
    works: tuple[Work, ...]
    made: tuple[Made, ...]


class Reader:
    """What makes blocks in a reader's process."""

    def __init__(self, spec: ReadSpec) -> None:
        keep_confidential(spec.job)
        self._spec = spec
        self._task = construct(spec.task, spec.job)
        self._cache = cache_of(spec.job)
        self._clock = SystemClock()
        self._node = ray.get_runtime_context().get_node_id()

    def make(self, number: int) -> Made | Block:
        """The block of a work; where there are shares, of one of those."""
        spec = self._spec
        if spec.shares:
            share = spec.shares[number]
            fetcher = BlockFetcher(self._cache, self._node, spec.handles, lambda *_, **__: None)
            pieces = (_rows(fetcher, spec.blocks[n]).take(rows) for n, rows in share.rows.items())
            return make_partition(share, pieces, self._cache, self._node)
        work = spec.works[number]
        if number in spec.tables:
            work = replace(work, table=ray.get(spec.tables[number]))
        return self._made(work)

    def table(self, table: pa.Table) -> TableMade:
        """The blocks of a table, which is known by its content alone."""
        recipe = self._spec.recipe
        inputs, works = plan_table(replace(recipe, source=replace(recipe.source, key=None)), table)
        made = tuple(self._made(work) for work in works)
        bare = tuple(replace(work, table=None) for work in works)
        return TableMade(input=inputs[0], works=bare, made=made)

    def _made(self, work: Work) -> Made:
        recipe, cache, clock = self._spec.recipe, self._cache, self._clock
        return make_block(recipe, work, self._task, cache, clock, self._node)


def _rows(fetcher: BlockFetcher, block: Block) -> pa.Table:
    table = fetcher.table(block)
    if table is None:
        raise MachineError(
            f"the block {block.key} is on no node any more", hint="start the run again"
        )
    return table


_lock = Lock()


@lru_cache(maxsize=_KEPT)
def _reader(spec: ObjectRef[Any]) -> Reader:
    return Reader(ray.get(spec))


def reader_of(spec: ObjectRef[Any]) -> Reader:
    """This process's reader for a spec: one, whoever asks."""
    with _lock:
        return _reader(spec)


def numbered(
    rows: Any, *, spec: list[ObjectRef[Any]], taking: tuple[Any, str]
) -> Iterator[dict[str, Any]]:
    """Makes what a row says; or, of a row that says nothing, whatever is left to be taken."""
    actor, ticket = taking
    with suppress(RaycloudError):  # told again when it is needed
        reader_of(spec[0])  # loads the task: a slow process keeps nobody waiting for what it took
    own = int(rows["number"][0])
    number = own if own >= 0 else ray.get(actor.take.remote(ticket))
    while number is not None:
        made = _alone(spec[0], "make", number)
        yield {"number": np.array([number]), "made": made}
        if own >= 0 or isinstance(made[0], RaycloudError):
            return
        number = ray.get(actor.take.remote(ticket))


def tabled(table: Any, *, spec: list[ObjectRef[Any]]) -> dict[str, Any]:
    """What `Reader.table` makes of a table."""
    made = _alone(spec[0], "table", table) if len(table) else np.empty(0, dtype=object)
    return {"made": made}


def _alone(spec: ObjectRef[Any], method: str, argument: Any) -> np.ndarray[Any, Any]:
    """What a reader makes, or the error of ours, as a column of one row."""
    column = np.empty(1, dtype=object)
    try:
        column[0] = getattr(reader_of(spec), method)(argument)
    except RaycloudError as error:
        column[0] = error
    return column


class WorkQueue:
    """What there is to make, taken by whichever reader is free: slow ones take less. Thread-safe.

    `actor` is that of this process; its method `take` calls `take`.
    """

    def __init__(self, actor: Any) -> None:
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


class Readers:
    """Makes blocks: at once in a thread of this process; where that would take long, in others too.

    Args:
        queue: Hands out what there is to make.
        cpus: Most that work at once.
        clock: For how long it takes.
        here: Says whether this process may; else only others do.
        notice: Told of readers that failed, by what happened and its details.
        places: Says which nodes others may be on, asked once there are to be others; None: all.
    """

    def __init__(
        self,
        queue: WorkQueue,
        cpus: int,
        clock: Clock,
        *,
        here: Callable[[], bool],
        notice: Callable[..., None],
        places: Callable[[], Sequence[str] | None],
    ) -> None:
        self._queue = queue
        self._cpus = cpus
        self._clock = clock
        self._may, self._places = here, places
        self._here = False
        self._notice = notice
        self._why = "their reader died"
        self._options: dict[str, Any] = {
            "batch_size": None,
            "ray_remote_args_fn": partial(dict, max_retries=_RETRIES),
        }

    def _elsewhere_options(self) -> dict[str, Any]:
        nodes = self._places()
        if nodes is None:
            return self._options
        return {**self._options, "label_selector": {"ray.io/node-id": f"in({', '.join(nodes)})"}}

    def run(
        self, spec: ReadSpec, numbers: Sequence[int], *, alone: bool = False
    ) -> Iterator[NumberedBlock]:
        """What `Reader.make` makes of each number, as it is done; `alone`: here, if that may be.

        Raises:
            RaycloudError: What a reader raised; of several the first to be done.
            MachineError: A reader's process died again and again.
        """
        if not numbers:
            return
        self._here = self._may()
        left = list(numbers)
        with self._queue.of(numbers) as ticket:
            for number, made in self._together(spec, left, ticket, here_alone=alone):
                if number in left:  # else a task that was run again made it again
                    left.remove(number)
                    yield number, _checked(made)
        if not left:
            return
        # A process died over what it had taken, or something else went wrong: told over which file.
        self._notice("blocks are tried again, one by one", why=self._why, left=len(left))
        with _blamed(lambda: _files(spec, left)), self._queue.of(()) as ticket:
            for number, made in self._elsewhere(spec, list(left), ticket):
                left.remove(number)
                yield number, _checked(made)

    def tables(self, spec: ReadSpec, dataset: Any) -> Iterator[TableMade]:
        """The blocks of a `ray.data.Dataset`, in its order.

        Raises:
            DataError: It needs a CPU, and none is free.
            RaycloudError: As `run` does.
        """
        make_modest()
        if needs_cpu(dataset) and ray.available_resources().get("CPU", 0.0) < 1.0:
            raise DataError(
                "the ray.data.Dataset that Task.data returned shuffles or sorts its rows, and all "
                "CPUs are reserved",
                hint="leave out the shuffle, which raycloud does itself; or lower "
                "elastic.max_workers by one",
            )
        rows = dataset.map_batches(
            tabled,
            batch_format="pyarrow",
            fn_kwargs={"spec": [ray.put(spec)]},
            **self._elsewhere_options(),
        )
        with _blamed(lambda: "a block of the ray.data.Dataset"):
            for row in quiet(rows, cpus=self._cpus, in_order=True).iter_rows():
                yield _checked(row["made"])

    def _together(
        self, spec: ReadSpec, left: Sequence[int], ticket: str, *, here_alone: bool
    ) -> Iterator[NumberedBlock]:
        """Whatever is made, here and elsewhere, until all is or nobody is at it any more."""
        # An error, or None: one of those at it has ended.
        found: SimpleQueue[NumberedBlock | BaseException | None] = SimpleQueue()
        began_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        count, at_it, first = len(left), 1, True
        # As many tasks as work at once, and not one for each number: Ray takes a worker back when
        # its task is done and leases it anew for the next, so that short tasks hardly overlap.
        most = self._cpus - 1 if self._here else self._cpus
        alone = self._here and most > 0 and not here_alone
        if self._here:
            _begin(found, partial(self._in_this_process, spec, ticket))
        else:
            _begin(found, partial(self._elsewhere, spec, [ANY] * min(most, count), ticket))
        while at_it and left:
            with suppress(Empty):
                got = found.get(timeout=_LOOK_S if alone else None)
                if isinstance(got, tuple):
                    yield got
                    if first:  # before it, the task was loaded
                        first, count = False, len(left)
                        began_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
                else:
                    at_it -= 1
                if isinstance(got, BaseException):
                    self._why = type(got).__name__
            spent_s, still = self._clock.monotonic_s() - began_s, len(left)
            spent = spent_s, self._clock.cpu_s() - cpu_s
            if alone and _pays(spent, made=count - still, left=still, first=first):
                alone, at_it = False, at_it + 1
                _begin(found, partial(self._elsewhere, spec, [ANY] * min(most, still), ticket))

    def _in_this_process(self, spec: ReadSpec, ticket: str) -> Iterator[NumberedBlock]:
        reader = Reader(spec)
        while (number := self._queue.take(ticket)) is not None:
            try:
                yield number, reader.make(number)
            except RaycloudError as error:
                yield number, error

    def _elsewhere(self, spec: ReadSpec, tasks: list[int], ticket: str) -> Iterator[NumberedBlock]:
        """One run of Ray Data: see `numbered`."""
        import ray.data

        options = self._elsewhere_options()  # and what nodes hold can be asked for
        make_modest()
        items = [{"number": number} for number in tasks]
        source: Any = ray.data.from_items(items, override_num_blocks=len(items))
        named = {"spec": [ray.put(spec)], "taking": (self._queue.actor, ticket)}
        rows = source.map_batches(numbered, fn_kwargs=named, **options)
        for row in quiet(rows, cpus=self._cpus, in_order=False).iter_rows():
            yield row["number"], row["made"]


def _pays(spent_s: tuple[float, float], *, made: int, left: int, first: bool) -> bool:
    """Whether others are worth their start: alone the rest takes longer than that.

    Args:
        spent_s: Since then, and of it processor time.
        made: Blocks since then.
        left: Still to be made, that included which is under way.
        first: No block is made yet: the task may still be loading.
    """
    wall_s, cpu_s = spent_s
    if wall_s < (_START_S if first else _LOOK_S):
        return False
    start_s = _START_S if cpu_s > _BUSY * wall_s else _WAITING_START_S
    # Where none is made, it is known only that one takes longer than was spent.
    return wall_s * (left - 1) > start_s * max(1, made)


def _begin(
    found: SimpleQueue[NumberedBlock | BaseException | None],
    make: Callable[[], Iterator[NumberedBlock]],
) -> None:
    """Put what is made into a queue, by a thread that nobody has to wait for."""

    def work() -> None:
        try:
            for one in make():
                found.put(one)
        except BaseException as error:  # noqa: BLE001 - told by a notice; what is left tried again
            found.put(error)
        else:
            found.put(None)

    Thread(target=work, name="reading", daemon=True).start()


def _checked(made: Any) -> Any:
    if isinstance(made, RaycloudError):
        raise made
    return made


@contextmanager
def _blamed(what: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except RaycloudError:
        raise
    except RayError as error:
        name = type(error).__name__
        if "Crashed" in name or "Died" in name or "OutOfMemory" in name:
            raise MachineError(
                f"the process that read {what()} died {_RETRIES + 1} times: {name}",
                hint="look for the kernel's word on memory (dmesg), lower data.cpus, and try "
                "Task.preprocess alone on that file",
            ) from error
        raise InternalError(f"reading {what()} failed: {error}") from error


def _files(spec: ReadSpec, left: Sequence[int]) -> str:
    """What was being read, as far as it is known."""
    first = min(left, default=0)
    if spec.shares:
        return f"partition {first}"
    files = [one.path for one in spec.works[first].slice.inputs]
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def quiet(rows: Any, *, cpus: int, in_order: bool) -> Any:
    """A `ray.data.Dataset` that runs without bars and talk, and keeps few CPUs busy.

    Args:
        rows: The data set, not run yet.
        cpus: Most tasks that each of its operators runs at once.
        in_order: Whether its rows come out in the order of what went in.
    """
    from ray.data._internal.execution import backpressure_policy as policies

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = rows.context
    context.enable_progress_bars = False
    context.execution_options.preserve_order = in_order
    context.execution_no_progress_timeout_s = -1  # preprocessing may take its time
    context.set_config(_CPUS, cpus)
    context.set_config(
        policies.ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
        [*policies.ENABLED_BACKPRESSURE_POLICIES, _Modest],
    )
    return rows


def needs_cpu(rows: Any) -> bool:
    """Whether a `ray.data.Dataset` has to shuffle or sort, which Ray Data does on CPUs of its own.

    What reads and maps is made to do without by `make_modest`.
    """
    from ray.data._internal.logical.operators import AbstractAllToAll

    plan = rows._logical_plan.dag  # noqa: SLF001
    return any(isinstance(operator, AbstractAllToAll) for operator in plan.post_order_iter())


class _Modest:
    """A back-pressure policy: no operator runs more tasks than there are CPUs to keep busy."""

    name = "modest"

    def __init__(self, context: Any, *_: Any) -> None:
        self._cpus = context.get_config(_CPUS)

    def can_add_input(self, operator: Any) -> bool:
        return bool(operator.num_active_tasks() < self._cpus)

    def max_task_output_bytes_to_read(self, operator: Any) -> None:
        del operator


@lru_cache(maxsize=1)
def make_modest() -> None:
    """Let Ray Data, where it is driven from this process, ask for no CPU and start only readers."""
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as scaling
    from ray.data._internal.execution.operators import map_operator

    for name in _STATISTICS:
        setattr(stats._StatsManager, name, staticmethod(_nothing))  # noqa: SLF001
    # It also tells Ray Data what the cluster has.
    known = scaling._AutoscalingCoordinatorActor(send_resources_request=_nothing)  # noqa: SLF001
    here = _Here(known)
    scaling.get_or_create_autoscaling_coordinator = lambda: here
    operators: Any = map_operator
    whole = operators._canonicalize_ray_remote_args  # noqa: SLF001
    operators._canonicalize_ray_remote_args = lambda options: whole(  # noqa: SLF001
        {"num_cpus": 0, **options}
    )


def _nothing(*_: Any, **__: Any) -> None:
    return


class _Here:
    """An object of this process that is called as an actor is."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._one, name)
        return SimpleNamespace(remote=lambda *args, **named: ray.put(method(*args, **named)))
