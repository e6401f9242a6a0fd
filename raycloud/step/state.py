"""Model, optimizer and schedule: their state as named tensors and plain values, and their update.

Names are qualified and the same on every member: `model/<name>` for parameters and persistent
buffers, `optimizer/<parameter>/<key>` for what the optimizer holds of a parameter, `held/<path>`
for tensors within other state: in lists, in settings of parameter groups, in the schedule.

What is exchanged, cleared and checkpointed are the parameters of the model that require a gradient
and that a group of the optimizer has, laid out once before the first step. What it would move
beside these would be moved by each member with its own gradient, and is refused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from raycloud.errors import RaycloudError, TaskError
from raycloud.order import stream_seed
from raycloud.step.contract import call, raised
from raycloud.step.nested import Packing, Unpacking, exactly
from raycloud.step.randomness import Randomness, others_state
from raycloud.step.stateful import Commit, Stateful

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from raycloud.task import Task

Entry = TypeVar("Entry")

EXTRA = "extra"  # among a checkpoint's values: what `get_extra_state` of modules has given


class ModelState(Stateful):
    """Names what model, optimizer and schedule hold; reads and writes it in place.

    The model is not its compiled form; without an `update` no step is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        update: Update | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._update = update
        by_identity = {id(p): name for name, p in model.named_parameters()}
        self._parameters = {f"model/{name}" for name in by_identity.values()}
        self._names = [by_identity[id(p)] for g in optimizer.param_groups for p in g["params"]]

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`."""
        if self._update is not None and not step.local:
            self._update.apply(step.step)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Stateful.tensors`."""
        return self._packed()[0]

    def moves(self, name: str) -> bool:
        """See `Stateful.moves`: buffers may."""
        name = name.removeprefix("held/")
        return name.startswith("model/") and name not in self._parameters

    def moments(self) -> dict[str, torch.Tensor]:
        """Of the tensors those that the optimizer holds of a parameter, if they can be averaged."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name.startswith("optimizer/") and tensor.is_floating_point()
        }

    @torch.no_grad()
    def put_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Write these in place; the optimizer gets those that it does not have yet."""
        held = self.moments()
        groups = self._optimizer.param_groups
        places = [(p, group) for group in groups for p in group["params"]]
        for name, tensor in moments.items():
            if name in held:
                held[name].copy_(tensor)
                continue
            of, _, key = name.removeprefix("optimizer/").rpartition("/")
            place, group = places[self._names.index(of)]
            here = tensor.dim() == 0 and not (group.get("fused") or group.get("capturable"))
            there = tensor if here else tensor.to(place.device)  # as torch has counts of steps
            self._optimizer.state[place][key] = there.clone()

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        return self._packed()[1]

    def extra(self) -> str:
        """A fingerprint of what modules hold beside parameters and buffers (`get_extra_state`)."""
        packing = Packing((self._model, self._optimizer))
        packed = _packed_extra(packing, self._model.state_dict())
        return f"{packed} {digest(packing.tensors.items())}"

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:
        """See `Stateful.check_fits`: names and shapes of the model, optimizer and schedule."""
        wanted = {n: t for n, t in self._model.state_dict().items() if not _is_extra(n)}
        given = {n: s for n, s in _below("model/", shapes).items() if not _is_extra(n)}
        _check_names(wanted, given)
        for what, kind in self._kinds().items():
            if (was := values["kinds"][what]) != kind:
                raise _unlike(
                    f"checkpoint's {what} is {was or 'none'}, the task's {kind or 'none'}"
                )
        for path in (*_below("optimizer/", shapes), *values["optimizer"]["scalars"]):
            if (name := path.rpartition("/")[0]) not in self._names:
                raise _unlike(f"checkpoint has optimizer state of {name!r}, which this model lacks")
        live, groups = len(self._optimizer.param_groups), len(values["optimizer"]["groups"])
        if live != groups:
            raise _unlike(f"checkpoint has {groups} parameter groups, the task's optimizer {live}")

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """See `Stateful.load`, with what fits; `TaskError`: the task's own code for it raised."""
        given = dict(_below("model/", tensors))
        unpacking = Unpacking(tensors=tensors)
        for name, packed in values.get(EXTRA, {}).items():
            given[name] = unpacking.unpack(packed, None, f"model/{name}")
        optimizer_state = self._optimizer_state(tensors, values["optimizer"], unpacking)
        schedule = None
        if self._scheduler is not None:
            there = dict(self._scheduler.state_dict())
            schedule = unpacking.unpack(dict(values["scheduler"]), there, "schedule")
        try:
            for copy in unpacking.copies:
                copy()
            self._model.load_state_dict(given, strict=True)
            self._load_optimizer(optimizer_state)
            self._put_attributes(values["optimizer"].get("attributes", {}))
            if self._scheduler is not None and schedule is not None:
                self._scheduler.load_state_dict(schedule)
            for load in unpacking.loads:
                load()
        except RaycloudError:
            raise
        except Exception as error:
            raise raised("loading the state of model, optimizer and schedule", error) from error

    def _kinds(self) -> dict[str, str | None]:
        schedule = self._scheduler
        return {
            "optimizer": type(self._optimizer).__name__,
            "schedule": None if schedule is None else type(schedule).__name__,
        }

    def _packed(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and values, in an order that all members share."""
        packing = Packing((self._model, self._optimizer))
        model, state = self._model.state_dict(), self._optimizer.state_dict()
        held = state.get("state", {})
        tensors = {f"model/{n}": value.detach() for n, value in model.items() if not _is_extra(n)}
        extra = _packed_extra(packing, model)
        for index, entries in held.items():
            for key, value in entries.items() if type(index) is int else ():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{self._names[index]}/{key}"] = value.detach()
        scalars = {
            (path := f"{self._names[index]}/{key}"): packing.pack(
                value, f"optimizer/{path}", objects=False
            )
            for index in sorted(key for key in held if type(key) is int)
            for key, value in sorted(held[index].items())
            if not isinstance(value, torch.Tensor)
        }
        groups = [
            {
                k: packing.pack(v, f"optimizer/groups/{at}/{k}")
                for k, v in group.items()
                if k != "params"
            }
            for at, group in enumerate(state.get("param_groups", ()))
        ]
        others = {
            key: packing.pack(held[key], f"optimizer/others/{key}", objects=False)
            for key in sorted((key for key in held if type(key) is not int), key=str)
        }
        more = {
            key: packing.pack(value, f"optimizer/more/{key}")
            for key, value in state.items()
            if key not in ("state", "param_groups")
        }
        rest = {"others": others, "more": more, "attributes": self._attributes()}
        optimizer = {"scalars": scalars, "groups": groups, **{n: v for n, v in rest.items() if v}}
        schedule = None
        if self._scheduler is not None:
            schedule = packing.pack(dict(self._scheduler.state_dict()), "schedule")
        values = {"kinds": self._kinds(), "optimizer": optimizer, "scheduler": schedule}
        return {**tensors, **packing.tensors}, {**values, **({EXTRA: extra} if extra else {})}

    def _attributes(self) -> dict[str, Any]:
        """Numbers and strings that an optimizer keeps in itself, such as a mode or a count."""
        return {
            name: value
            for name, value in vars(self._optimizer).items()
            if type(value) in (bool, int, float, str) and name not in _torch_attributes()
        }

    def _put_attributes(self, attributes: Mapping[str, Any]) -> None:
        held = vars(self._optimizer)
        for name in self._attributes().keys() - attributes.keys() if attributes else ():
            del held[name]
        held.update(attributes)

    def _optimizer_state(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], unpacking: Unpacking
    ) -> dict[str, Any]:
        index_of = {name: i for i, name in enumerate(self._names)}
        state: dict[Any, Any] = {}
        scalars = {
            path: unpacking.unpack(packed, None, f"optimizer/{path}")
            for path, packed in values["scalars"].items()
        }
        for path, value in (*_below("optimizer/", tensors).items(), *scalars.items()):
            name, _, key = path.rpartition("/")
            state.setdefault(index_of[name], {})[key] = value
        groups, at = [], 0
        live = self._optimizer.param_groups
        for number, (group, saved) in enumerate(zip(live, values["groups"], strict=True)):
            own = unpacking.unpack(saved, group, f"optimizer/groups/{number}")
            groups.append({**own, "params": list(range(at, at + len(group["params"])))})
            at += len(group["params"])
        there = self._optimizer.state_dict()
        held = there.get("state", {})
        for key, packed in values.get("others", {}).items():
            state[key] = unpacking.unpack(packed, held.get(key), f"optimizer/others/{key}")
        more = {
            key: unpacking.unpack(packed, there.get(key), f"optimizer/more/{key}")
            for key, packed in values.get("more", {}).items()
        }
        return {**more, "state": state, "param_groups": groups}

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        """Load it, then put back what loading has cast, copied or read in another way."""
        self._optimizer.load_state_dict(saved)
        for group, own in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
        places = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = getattr(self._optimizer, "state", {})
        for key, own in saved["state"].items():
            at = places[key] if type(key) is int else key
            if (held := state.get(at)) is None:  # who wraps one may keep it elsewhere
                continue
            if isinstance(held, dict):
                held.update({k: exactly(v, held.get(k)) for k, v in own.items()})
            else:
                state[at] = exactly(own, held)


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A fingerprint of named tensors, equal where all are bitwise the same: 16 hex digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _packed_extra(packing: Packing, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: packing.pack(value, f"model/{name}", objects=False)
        for name, value in model.items()
        if _is_extra(name)
    }


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"  # torch's name for it


@cache
def _torch_attributes() -> frozenset[str]:
    """What every optimizer of torch's has, and what a schedule adds."""
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return frozenset({*vars(plain), "_opt_called", "_step_count"})


def _below(begin: str, named: Mapping[str, Entry]) -> dict[str, Entry]:
    return {n.removeprefix(begin): e for n, e in named.items() if n.startswith(begin)}


def _check_names(wanted: Mapping[str, torch.Tensor], given: Mapping[str, tuple[int, ...]]) -> None:
    if missing := sorted(set(wanted) - set(given)):
        raise _unlike(f"checkpoint lacks {missing[0]!r} of this model")
    if extra := sorted(set(given) - set(wanted)):
        raise _unlike(f"checkpoint has {extra[0]!r}, which is not this model's")
    for name, tensor in wanted.items():
        here, there = tuple(tensor.shape), given[name]
        if here != there:
            raise _unlike(f"checkpoint has shape {there} for {name!r}, this model {here}")


def _unlike(problem: str) -> TaskError:
    hint = "resume with the task and settings the run was started with"
    return TaskError(f"the {problem}", hint=hint)


_UPDATE_STREAM = 4
_NAMED = 3  # of many
_UNFREEZE = (
    "let it require a gradient from the start: until it is to move, compute its part of the model "
    "under torch.no_grad() (what has no gradient is left as it is), or give its group lr=0"
)


def layout(tensors: Mapping[str, torch.Tensor]) -> int:
    """A number of 48 bits for names, types and shapes."""
    told = "\n".join(f"{n} {t.dtype} {tuple(t.shape)}" for n, t in tensors.items())
    return int(hashlib.sha256(told.encode()).hexdigest()[:12], 16)


class TrainedParameters:
    """Finds what is trained, and sees that it stays that.

    `parameters`, by name in the model's order, are exchanged. Those that are `idle` require a
    gradient, but no group has them: their gradients are neither exchanged nor part of the
    gradient's norm. `TaskError`: the optimizer has parameters that the model has not, or nothing is
    trained.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._count = _count(optimizer)
        moved = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for p in model.parameters()}
        if outside := [p for p in moved if id(p) not in known]:
            raise _refused(task, outside)
        mine = {id(p) for p in moved}
        every = list(model.named_parameters())
        self.parameters = [(n, p) for n, p in every if p.requires_grad and id(p) in mine]
        self.idle = [(n, p) for n, p in every if p.requires_grad and id(p) not in mine]
        self._frozen = [(n, p) for n, p in every if not p.requires_grad and id(p) in mine]
        if not self.parameters:
            raise TaskError(
                "the optimizer has no parameter that requires a gradient"
                if self.idle
                else "the model has no parameter that requires a gradient",
                hint="check Task.optimizer" if self.idle else "check Task.model",
            )

    @property
    def bytes(self) -> int:
        """Of their gradients."""
        return sum(p.numel() * p.element_size() for _, p in self.parameters)

    def check(self, step: int) -> None:
        """`TaskError` for what is trained since the start, before the update that would move it.

        Only parameters that were frozen at the start are looked at, two attributes of each.
        """
        self.check_groups(step)
        for name, parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise TaskError(
                    f"parameter {name!r} was frozen at the start and requires a gradient at step "
                    f"{step}: what is unfrozen on the way is not exchanged",
                    hint=_UNFREEZE,
                )

    def check_groups(self, step: int) -> None:
        """`TaskError` for what was added to the optimizer since the start."""
        count = _count(self.optimizer)
        if count != self._count:
            raise TaskError(
                f"the optimizer has {count} parameters at step {step}, and had {self._count} at "
                "the start: what is added on the way is not exchanged",
                hint="give the optimizer all of its groups in Task.optimizer; " + _UNFREEZE,
            )

    def clear(self) -> None:
        """Forget the gradients that nobody asks for."""
        for _, parameter in self.idle:
            parameter.grad = None


def _count(optimizer: Optimizer) -> int:
    return sum([len(group["params"]) for group in optimizer.param_groups])


def _refused(task: Task, outside: list[torch.Tensor]) -> TaskError:
    held = [found for name, value in vars(task).items() for found in _inside(name, value)]
    found = {id(p): f"the task's {where}" for where, p in held}
    names = [
        found.get(id(p), f"one of shape {tuple(p.shape)} that no attribute of the task holds")
        for p in outside
    ]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    many = "a parameter that is" if len(names) == 1 else f"{len(names)} parameters that are"
    return TaskError(
        f"the optimizer has {many} not the model's: {', '.join(names[:_NAMED])}{more}; "
        "only the model's are exchanged and kept in checkpoints",
        hint="make them part of what Task.model returns, such as an nn.ModuleDict of the model and "
        "the criterion, and use them from there in Task.loss",
    )


def _inside(where: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an attribute of the task holds, by where they stand."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{where}.{name}", parameter
    elif isinstance(value, dict | list | tuple):
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            if isinstance(held, torch.Tensor | nn.Module):
                yield from _inside(f"{where}[{key!r}]", held)


class Update:
    """Steps optimizer and schedule by the gradients that are there, seeded alike everywhere.

    The first one shows whether numpy's and Python's generators have to be seeded, too. The
    `scheduler` is None where it is not stepped once per step.

    Attributes:
        others: Tensors by name that are watched: a step should leave them alone.
        moves: The first of them that one has changed; empty: none.
        factor: By what rates are multiplied for an update, and for it alone.
        schedule_steps: Of the schedule, after it.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        scheduler: LRScheduler | None,
        randomness: Randomness,
        seed: int,
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._trained, self.scheduler = trained, scheduler
        self._randomness, self._seed, self._notice = randomness, seed, notice
        self._draws = True  # from numpy's or Python's generator; or none was made yet
        self.others: Sequence[tuple[str, torch.Tensor]] = ()
        self.moves = ""
        self.factor, self.schedule_steps = 1.0, 1

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        """Meanwhile rates are multiplied by the factor."""
        groups = [g for g in self._trained.optimizer.param_groups if "lr" in g]
        rates = [group["lr"] for group in groups]
        if self.factor != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * self.factor
        try:
            yield
        finally:
            if self.factor != 1.0:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

    def apply(self, step: int, *, schedules: bool = True) -> None:
        """Move the parameters; `TaskError`: the task's code raised, or others are trained.

        The schedule is stepped, too, if it `schedules`.
        """
        self._trained.check(step)
        randomness, everything = self._randomness, self._draws
        randomness.seed(stream_seed(self._seed, _UPDATE_STREAM, step), everything=everything)
        before = others_state()
        try:
            versions = [t._version for _, t in self.others]  # noqa: SLF001 - has no public name
            with self._scaled():
                call("Task.optimizer", self._trained.optimizer.step)
            for (name, tensor), version in zip(self.others, versions, strict=True):
                if tensor._version != version:  # noqa: SLF001 - likewise
                    self.moves = self.moves or name
            if self.scheduler is not None and schedules:
                for _ in range(self.schedule_steps):
                    call("Task.scheduler", self.scheduler.step)
            self._draws = others_state() != before
        finally:
            randomness.release()
        if self._draws and not everything:
            what = "the optimizer began to draw from numpy's or Python's generator: in this step "
            what += "replicas may have drawn unlike numbers, from now on they draw the same"
            self._notice(what, {"step": step})
        self._trained.check_groups(step + 1)
        self._trained.clear()


# Private names of torch, which has no public one for this. Where they are others, it loads its
# compiler as it did; a test holds them.
_UNTRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_DISABLED = "__dynamo_disable"
_BREAKS = "_use_grad"


def without_compiler() -> None:
    """Let torch's optimizers do their work, from now on in this process, without its compiler.

    torch loads all of its compiler as soon as an optimizer is made, and asks for it again in each
    step, to tell it what not to trace: 800 modules, a second of processor time and more than 100 MB
    on the way to a worker's first step. The task may compile what it likes; an optimizer's step
    that is compiled is traced as a whole.
    """
    for name in _UNTRACED:
        plain = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _DISABLED):
            setattr(plain, _DISABLED, plain)
    found = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds: list[Any] = [kind for kind in found if issubclass(kind, Optimizer)]
    for kind in kinds:
        step = vars(kind).get("step")
        if getattr(getattr(step, "__code__", None), "co_name", "") == _BREAKS:
            kind.step = _stepping(step.__wrapped__)


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose gradients are recorded where they were before."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain
