"""A replica's state as named tensors and plain values, and back.

Names are qualified and the same on every member: `model/<name>` for parameters and persistent
buffers, `optimizer/<parameter>/<key>` for what the optimizer holds of a parameter, `held/<path>`
for tensors that lie deeper (`packed`). Everything that is no tensor (settings of parameter groups,
the schedule, extra state of modules) is a plain value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raycloud.errors import CheckpointError, TaskError
from raycloud.order import Skip, skip_of
from raycloud.training.packed import like, pack, unpack

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


SKIPS, LEFT_OUT, EXTRA = "skips", "left_out", "extra"  # their names among a checkpoint's values


class ReplicaState:
    """Names what a replica holds; reads and writes it in place.

    Args:
        model: The user's model, not its compiled form.
        optimizer: Its optimizer.
        scheduler: Its schedule, if any.

    Attributes:
        beside: Plain values that a checkpoint keeps beside the replica's own, by name; to be
            replaced whole.
        skips: What steps took and did not count, by step: a part of the state like any other.
        left_out: Steps that are to be skipped as a whole: so is this.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> None:
        """Number the parameters as the optimizer does."""
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.beside: Mapping[str, Any] = {}
        self.skips: tuple[Skip, ...] = ()
        self.left_out: frozenset[int] = frozenset()
        by_identity = {id(p): name for name, p in model.named_parameters()}
        self._parameters = {f"model/{name}" for name in by_identity.values()}
        self._names = [by_identity[id(p)] for g in optimizer.param_groups for p in g["params"]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by name: not copies, and changed by the next commit."""
        found = {
            f"model/{name}": t.detach()
            for name, t in self._model.state_dict().items()
            if not _is_extra(name)
        }
        for index, entries in self._optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{self._names[index]}/{key}"] = value.detach()
        self._pack(found)
        return found

    def is_buffer(self, name: str) -> bool:
        """Whether a forward pass may change this tensor; all others change at a commit only."""
        return name.startswith("model/") and name not in self._parameters

    def values(self) -> dict[str, Any]:
        """What is no tensor.

        Raises:
            TaskError: It is nothing that a checkpoint can hold.
        """
        return {
            "kinds": self._kinds(),
            **self._pack({}),
            **({SKIPS: [skip.to_record() for skip in self.skips]} if self.skips else {}),
            **({LEFT_OUT: sorted(self.left_out)} if self.left_out else {}),
            **self.beside,
        }

    def _pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Values of optimizer, schedule and modules; the tensors in them go to `tensors`."""
        state = self._optimizer.state_dict()
        scalars = {
            path: pack(value, f"optimizer/{path}", tensors)
            for index, entries in state["state"].items()
            for key, value in entries.items()
            if not isinstance(value, torch.Tensor) and (path := f"{self._names[index]}/{key}")
        }
        groups = [
            pack({k: v for k, v in g.items() if k != "params"}, f"groups/{i}", tensors)
            for i, g in enumerate(state["param_groups"])
        ]
        schedule = None if self._scheduler is None else self._scheduler.state_dict()
        extra = {
            name: pack(value, f"model/{name}", tensors)
            for name, value in self._model.state_dict().items()
            if _is_extra(name)
        }
        return {
            "optimizer": {"scalars": scalars, "groups": groups},
            "scheduler": pack(schedule, "schedule", tensors),
            **({EXTRA: extra} if extra else {}),
        }

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Become the state that `tensors` and `values` describe.

        Raises:
            TaskError: Names or shapes are not this model's, or optimizer or schedule are others.
                Nothing has changed, but where it is an object that the schedule holds.
        """
        live = self._model.state_dict()
        wanted = {name: tensor for name, tensor in live.items() if not _is_extra(name)}
        given = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
        _check_names(wanted, given)
        _check_kinds(self._kinds(), values["kinds"])
        optimizer_state = self._optimizer_state(tensors, values["optimizer"])
        skips, left_out = _skips(values.get(SKIPS, ())), _steps(values.get(LEFT_OUT, []))
        extra = {
            name: unpack(values.get(EXTRA, {}).get(name), live[name], tensors, name)
            for name in live.keys() - wanted.keys()
        }
        self._model.load_state_dict({**given, **extra}, strict=True)
        self._load_optimizer(optimizer_state)
        if self._scheduler is not None:
            made = self._scheduler.state_dict()
            self._scheduler.load_state_dict(
                unpack(dict(values["scheduler"]), made, tensors, "the schedule")
            )
        self.skips, self.left_out = skips, left_out

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Load it; what `load_state_dict` casts to the dtype of a parameter is put right."""
        self._optimizer.load_state_dict(state)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, entries in state["state"].items():
            loaded = self._optimizer.state[parameters[index]]
            loaded.update({key: like(value, loaded[key]) for key, value in entries.items()})

    def _kinds(self) -> dict[str, str | None]:
        schedule = self._scheduler
        return {
            "optimizer": type(self._optimizer).__name__,
            "schedule": None if schedule is None else type(schedule).__name__,
        }

    def _optimizer_state(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        index_of = {name: i for i, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        entries: dict[str, Any] = {
            name.removeprefix("optimizer/"): t
            for name, t in tensors.items()
            if name.startswith("optimizer/")
        }
        scalars = unpack(values["scalars"], {}, tensors, "the optimizer")
        for path, value in (*entries.items(), *scalars.items()):
            name, _, key = path.rpartition("/")
            if name not in index_of:
                raise TaskError(
                    f"the checkpoint has optimizer state of {name!r}, which this model lacks",
                    hint="resume with the task the run was started with",
                )
            state.setdefault(index_of[name], {})[key] = value
        groups, at = [], 0
        live = self._optimizer.param_groups
        if len(live) != len(values["groups"]):
            raise TaskError(
                f"the checkpoint has {len(values['groups'])} parameter groups, the task's "
                f"optimizer {len(live)}",
                hint="resume with the task the run was started with",
            )
        for group, saved in zip(live, values["groups"], strict=True):
            count = len(group["params"])
            unpacked = unpack(saved, group, tensors, "a parameter group")
            groups.append({**unpacked, "params": list(range(at, at + count))})
            at += count
        return {"state": state, "param_groups": groups}


def _is_extra(name: str) -> bool:
    """Whether it is a module's `get_extra_state`, whatever that is."""
    return name.rpartition(".")[2] == "_extra_state"


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A fingerprint of named tensors, equal where all are bitwise the same: 16 hex digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _skips(records: Any) -> tuple[Skip, ...]:
    try:
        return tuple(skip_of(record) for record in records)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what the checkpoint says of skipped samples cannot be used: {error}",
            hint="resume from another checkpoint",
        ) from error


def _steps(numbers: Any) -> frozenset[int]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise CheckpointError(
            f"what the checkpoint says of steps to leave out cannot be used: {numbers!r:.80}",
            hint="resume from another checkpoint",
        )
    return frozenset(numbers)


def _check_names(wanted: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    hint = "resume with the task and settings the run was started with"
    if missing := sorted(set(wanted) - set(given)):
        raise TaskError(f"the checkpoint lacks {missing[0]!r} of this model", hint=hint)
    if extra := sorted(set(given) - set(wanted)):
        raise TaskError(f"the checkpoint has {extra[0]!r}, which is not this model's", hint=hint)
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            raise TaskError(
                f"{name!r} has shape {tuple(given[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in this model",
                hint=hint,
            )


def _check_kinds(wanted: Mapping[str, str | None], given: Mapping[str, str | None]) -> None:
    for what, kind in wanted.items():
        if given[what] != kind:
            raise TaskError(
                f"the checkpoint's {what} is {given[what] or 'none'}, the task's {kind or 'none'}",
                hint="resume with the task the run was started with",
            )
