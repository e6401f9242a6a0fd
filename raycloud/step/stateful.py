"""Stateful: what a replica holds is a list of parts, and a step is a transaction over that list.

Whoever adds a part adds a class, and puts what makes it into `replica.PARTS`. Checkpoints, state
transfer, catch-up and roll-back walk the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raycloud.checkpoint import encode
from raycloud.checkpoint.payload import check_tensors
from raycloud.errors import CheckpointError, TaskError
from raycloud.order import Skip, skip_of

if TYPE_CHECKING:
    import torch


Entry = TypeVar("Entry")

_PARTS = "parts"  # among a checkpoint's values: those of parts that have a name, by that
_FORMAT = "format"  # among these: its number
_WHOLE = ("model", "optimizer", "held")  # how whole names of tensors begin
_MAY_GO = (
    "residual",
    "outer",
    "adascale",
)  # a run that has no such part goes on without what a checkpoint has of it
_HINT = "resume with the task and the version of raycloud that the run was started with"


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A step that counts, of `count` micro-batches; the others stand for those that are `left_out`.

    Or a round of so many `steps`, the first of which it names, where members have made them as
    `local` ones. `skips` are what of it does not count. Where it is committed later than by others
    there are `sums` of its exchange; else those that have just come are in place.
    """

    step: int
    count: int
    steps: int = 1
    local: bool = False
    left_out: Sequence[int] = ()
    skips: tuple[Skip, ...] = ()
    sums: Sums | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What the exchange of a step has brought, its gradients clipped.

    Attributes:
        step: What all others have committed.
        gradients: The flags, then the message of each bucket; none where the step changes nothing.
        statistics: Those of the buffers that a forward pass changes.
        averaged: Numbers of the buffers that `statistics` has beside running averages.
        measured: It is no step, but what was measured after it.
    """

    step: Commit
    gradients: tuple[torch.Tensor, ...] = ()
    statistics: tuple[torch.Tensor, ...] = ()
    averaged: tuple[int, ...] = ()
    measured: float | None = None

    @property
    def bytes(self) -> int:
        """How much memory they take."""
        return sum(t.nbytes for t in (*self.gradients, *self.statistics))


class CatchingUp(Protocol):
    """What a replica without the state does with the others' steps: see `recovery.catch_up`."""

    def catch_up(self, arrived: Callable[[], bool]) -> None:
        """Commit what is kept until the exchange under way has `arrived`."""

    def keep(self, step: Commit) -> None:
        """Keep a step whose mean gradients are in place."""

    def keep_nothing(self, step: int, skips: tuple[Skip, ...], steps: int = 1) -> None:
        """Keep that a step, or a round of so many, changes nothing."""

    def keep_measured(self, steps: int, value: float) -> None:
        """Keep what was measured after so many steps."""

    def close(self) -> None:
        """Wait for the state no more; nothing of it is written once this returns."""


class Stateful:
    """A part of what a replica holds. What a part does not need to do, it does not define.

    Order of calls, each step: `stage`, or `resume` where it was suspended; forward and backward
    passes; then `commit` or `discard`. A step that waits for another generation is `suspend`ed.
    Parts commit in the order of the list, so a later one finds what an earlier one has changed. All
    members commit the same steps, some later than others, and must end with the same bits.

    A member that catches up commits older steps, each with its `sums`, while a newer one may be
    staged, and it `load`s in a thread of its own, before it has committed any.

    Attributes:
        name: What its state is called in a checkpoint; empty: its entries have whole names.
        format: Of its state. A state of another number is refused: whoever raises it and is to read
            older ones, too, gives the part another name, and a second part that reads those.
    """

    name = ""
    format = 1

    def stage(self) -> None:
        """A step begins; what it computes is kept beside what there is."""

    def commit(self, step: Commit) -> None:
        """The step counts."""

    def discard(self) -> None:
        """The step does not count: nothing of it remains."""

    def suspend(self) -> None:
        """The step has to wait: all is as before it, and what is computed of it is kept."""

    def resume(self) -> None:
        """It goes on where it was suspended, if it was."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by name: not copies, and changed by the next commit."""
        return {}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that differ from member to member: copies, for a checkpoint alone.

        It has those of all members; `load` gets them as `<name>/<number>`, where members are
        numbered from 0. Who takes the state from another member gets none.
        """
        return {}

    def values(self) -> dict[str, Any]:
        """What is no tensor: numbers, strings, lists and dictionaries of them."""
        return {}

    def moves(self, name: str) -> bool:  # noqa: ARG002 - as a rule none does
        """Whether a forward pass may change this tensor; all others change at a commit only."""
        return False

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:
        """Refuse a state that this part cannot become: `TaskError` that names what differs."""

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Become the state that these describe; the tensors may be kept."""

    def begin(self) -> None:
        """A state without this part was loaded: begin from what the parts before it hold now."""


class History(Stateful):
    """What steps took and did not count, and what the schedule was stepped by.

    Steps that are `left_out` are skipped as a whole. After how many steps a schedule was stepped by
    what was `measured` is told with that.
    """

    def __init__(self) -> None:
        self.skips: tuple[Skip, ...] = ()
        self.left_out: frozenset[int] = frozenset()
        self.measured: tuple[int, float] | None = None

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`."""
        self.skips += step.skips

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`; what did not happen is not told."""
        told = {
            "skips": [skip.to_record() for skip in self.skips],
            "left_out": sorted(self.left_out),
            "measured": list(self.measured or ()),
        }
        return {name: value for name, value in told.items() if value}

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has no tensors
        """See `Stateful.check_fits`; `CheckpointError` where what is told cannot be used."""
        History().load({}, values)

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has none
        """See `Stateful.load`."""
        try:
            self.skips = tuple(skip_of(record) for record in values.get("skips", ()))
        except (TypeError, ValueError) as error:
            raise _unusable("skipped samples", str(error)) from error
        match values.get("left_out", []):
            case [*steps] if all(type(n) is int and n >= 0 for n in steps):
                self.left_out = frozenset(steps)
            case other:
                raise _unusable("steps to leave out", f"{other!r:.80}")
        match values.get("measured"):
            case None:
                self.measured = None
            case [int() as step, float() as number]:
                self.measured = step, number
            case other:
                raise _unusable("what was measured", f"{other!r:.80}")


class ReplicaState:
    """The list of parts, in the order in which they commit: a transaction, and their state.

    Tensors of a part with a name are called `<name>/<theirs>`; its values stand under that name.
    `beside` are plain values that a checkpoint keeps beside the replica's own, to be replaced
    whole.
    """

    def __init__(self, parts: Sequence[Stateful]) -> None:
        names = [part.name for part in parts if part.name]
        taken = len({*names, *_WHOLE}) < len(names) + len(_WHOLE)
        if taken or any("/" in name for name in names):
            raise ValueError(f"parts of a replica need names of their own, without /: {names}")
        self.parts = tuple(parts)
        self.beside: Mapping[str, Any] = {}
        self._checked = False  # a checkpoint can hold what the first step has made

    def add(self, part: Stateful) -> None:
        """Have another part, which commits after all others; between steps, alike on all members.

        Its name is one of those without which a checkpoint's state is whole.
        """
        if part.name not in _MAY_GO or part.name in {one.name for one in self.parts}:
            raise ValueError(f"{part.name!r} is no part that a replica may add")
        self.parts = (*self.parts, part)

    def stage(self) -> None:
        """See `Stateful.stage`."""
        for part in self.parts:
            part.stage()

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`; the first may raise `TaskError`: no checkpoint holds this."""
        for part in self.parts:
            part.commit(step)
        if not self._checked:  # the optimizer has made its state by now
            self.check()
            self._checked = True

    def discard(self) -> None:
        """See `Stateful.discard`."""
        for part in self.parts:
            part.discard()

    def suspend(self) -> None:
        """See `Stateful.suspend`."""
        for part in self.parts:
            part.suspend()

    def resume(self) -> None:
        """See `Stateful.resume`."""
        for part in self.parts:
            part.resume()

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Stateful.tensors`."""
        return {
            f"{part.name}/{name}" if part.name else name: tensor
            for part in self.parts
            for name, tensor in part.tensors().items()
        }

    def own_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """See `Stateful.own_tensors`, of the member of this number."""
        return {
            f"{part.name}/{name}/{number}": tensor
            for part in self.parts
            for name, tensor in part.own_tensors().items()
        }

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        found: dict[str, Any] = {}
        named: dict[str, Any] = {}
        for part in self.parts:
            if part.name:
                named[part.name] = {**part.values(), _FORMAT: part.format}
            else:
                found |= part.values()
        return {**found, **({_PARTS: named} if named else {}), **self.beside}

    def is_buffer(self, name: str) -> bool:
        """See `Stateful.moves`."""
        return any(part.moves(own) for part in self.parts for own in _of(part, {name: None}))

    def check(self) -> None:
        """Refuse a state that no checkpoint could carry: `TaskError` names what is to blame."""
        encode(self.values())
        check_tensors(self.tensors())

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:
        """Refuse a state of another model, optimizer, schedule or part, before tensors are read.

        `TaskError` names what differs; `CheckpointError`: no version has said that of a part.
        """
        named = values.get(_PARTS, {})
        known = {*_WHOLE, *_MAY_GO, *(part.name for part in self.parts)}
        if strange := {*named, *(name.partition("/")[0] for name in shapes)} - known:
            raise TaskError(
                f"the checkpoint has state of {min(strange)!r}, which this run has not", hint=_HINT
            )
        for part in self.parts:
            if (own := _own(part, values)) is None:
                continue
            if part.name and own[_FORMAT] != part.format:
                raise CheckpointError(
                    f"the checkpoint has state of {part.name!r} in format {own[_FORMAT]!r}, "
                    f"not {part.format}",
                    hint=_HINT,
                )
            part.check_fits(_of(part, shapes), own)

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Become the state that `tensors` and `values` describe.

        A part that they do not know begins from what those before it hold now. `TaskError`: the
        task's own code for it raised, or, and then nothing has changed, it is not of this model or
        these parts.
        """
        self.check_fits({name: tuple(t.shape) for name, t in tensors.items()}, values)
        for part in self.parts:
            if (own := _own(part, values)) is None:
                part.begin()
            else:
                part.load(_of(part, tensors), own)


def _own(part: Stateful, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return values.get(_PARTS, {}).get(part.name) if part.name else values


def _of(part: Stateful, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries that are a part's own, by what it calls them."""
    if part.name:
        begin = f"{part.name}/"
        return {n.removeprefix(begin): e for n, e in entries.items() if n.startswith(begin)}
    return {name: e for name, e in entries.items() if name.partition("/")[0] in _WHOLE}


def _unusable(what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"what the checkpoint says of {what} cannot be used: {why}",
        hint="resume from another checkpoint",
    )
