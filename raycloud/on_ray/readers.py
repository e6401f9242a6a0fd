"""Readers at work: in this process, and as Ray Data's tasks on any node's CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raycloud.errors import DataError, InternalError, MachineError, RaycloudError
from raycloud.on_ray.ray_data import make_modest, needs_cpu, quiet
from raycloud.on_ray.reader import ANY, Brief, Reader, TableMade, Turns, numbered, tabled

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycloud.clock import Clock

_RETRIES = 3  # of a task whose process dies
_LOOK_S = 0.5  # after which it is foreseen how long all of it takes here
_START_S = 3.0  # CPU time that a process takes to start: torch, Ray Data and the task

Made = tuple[int, Any]


class Readers:
    """Makes blocks: at once in a thread of this process; where that would take long, in others too.

    Args:
        turns: Hands out what there is to make.
        cpus: Most that work at once.
        clock: For how long it takes.
        here: Whether this process may; else only others do.
        notice: Told of readers that failed, by what happened and its details.
        nodes: Where others may; None: anywhere.
    """

    def __init__(
        self,
        turns: Turns,
        cpus: int,
        clock: Clock,
        *,
        here: bool,
        notice: Callable[..., None],
        nodes: Sequence[str] | None = None,
    ) -> None:
        """Nothing is run yet."""
        self._turns = turns
        self._cpus = cpus
        self._clock = clock
        self._here = here
        self._notice = notice
        self._why = "their reader died"
        self._options: dict[str, Any] = {
            "batch_size": None,
            "ray_remote_args_fn": partial(dict, max_retries=_RETRIES),
        }
        if nodes is not None:
            self._options["label_selector"] = {"ray.io/node-id": f"in({', '.join(nodes)})"}

    def run(self, brief: Brief, method: str, numbers: Sequence[int]) -> Iterator[Made]:
        """What `Reader.<method>` makes of each number, as it is done.

        Raises:
            RaycloudError: What a reader raised; of several the first to be done.
            MachineError: A reader's process died again and again.
        """
        if not numbers:
            return
        left = list(numbers)
        with self._turns.of(numbers) as ticket:
            for number, made in self._together(brief, method, left, ticket):
                if number in left:  # else a task that was run again made it again
                    left.remove(number)
                    yield number, _checked(made)
        if not left:
            return
        # A process died over what it had taken, or something else went wrong: told over which file.
        self._notice("blocks are tried again, one by one", why=self._why, left=len(left))
        with _blamed(lambda: _files(brief, left)), self._turns.of(()) as ticket:
            for number, made in self._elsewhere(ray.put(brief), method, list(left), ticket):
                left.remove(number)
                yield number, _checked(made)

    def tables(self, brief: Brief, dataset: Any) -> Iterator[TableMade]:
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
            fn_kwargs={"brief": [ray.put(brief)]},
            **self._options,
        )
        with _blamed(lambda: "a block of the ray.data.Dataset"):
            for row in quiet(rows, cpus=self._cpus, in_order=True).iter_rows():
                yield _checked(row["made"])

    def _together(
        self, brief: Brief, method: str, left: Sequence[int], ticket: str
    ) -> Iterator[Made]:
        """Whatever is made, here and elsewhere, until all is or nobody is at it any more."""
        # An error, or None: one of those at it has ended.
        found: SimpleQueue[Made | BaseException | None] = SimpleQueue()
        began_s, count, at_it = self._clock.monotonic_s(), len(left), 0
        if self._here:
            at_it += 1
            _begin(found, partial(self._in_this_process, brief, method, ticket))
        alone = self._here and self._cpus > 1
        if not self._here:
            at_it += 1
            _begin(found, partial(self._anything, brief, method, left, ticket))
        while at_it and left:
            with suppress(Empty):
                got = found.get(timeout=_LOOK_S if alone else None)
                if isinstance(got, tuple):
                    yield got
                else:
                    at_it -= 1
                if isinstance(got, BaseException):
                    self._why = type(got).__name__
            spent_s = self._clock.monotonic_s() - began_s
            if (
                alone
                and spent_s >= _LOOK_S
                and spent_s * len(left) > _START_S * (count - len(left))
            ):
                alone = False
                at_it += 1
                _begin(found, partial(self._anything, brief, method, left, ticket))

    def _in_this_process(self, brief: Brief, method: str, ticket: str) -> Iterator[Made]:
        reader = Reader(brief)
        while (number := self._turns.take(ticket)) is not None:
            try:
                made = getattr(reader, method)(number)
            except RaycloudError as error:
                made = error
            yield number, made

    def _anything(
        self, brief: Brief, method: str, left: Sequence[int], ticket: str
    ) -> Iterator[Made]:
        # As many tasks as work at once, and not one for each number: Ray takes a worker back when
        # its task is done and leases it anew for the next, so that short tasks hardly overlap.
        most = self._cpus - 1 if self._here else self._cpus
        tasks = [ANY] * min(most, len(left))
        yield from self._elsewhere(ray.put(brief), method, tasks, ticket)

    def _elsewhere(
        self, brief: ObjectRef[Any], method: str, tasks: list[int], ticket: str
    ) -> Iterator[Made]:
        """One run of Ray Data: see `numbered`."""
        import ray.data

        make_modest()
        items = [{"number": number} for number in tasks]
        source: Any = ray.data.from_items(items, override_num_blocks=len(items))
        named = {"brief": [brief], "method": method, "taking": (self._turns.actor, ticket)}
        rows = source.map_batches(numbered, fn_kwargs=named, **self._options)
        for row in quiet(rows, cpus=self._cpus, in_order=False).iter_rows():
            yield row["number"], row["made"]


def _begin(
    found: SimpleQueue[Made | BaseException | None], make: Callable[[], Iterator[Made]]
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


def _files(brief: Brief, left: Sequence[int]) -> str:
    """What was being read, as far as it is known."""
    first = min(left, default=0)
    if brief.shares:
        return f"partition {first}"
    files = [one.path for one in brief.works[first].slice.inputs]
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
