"""`Embedding`: rows by id, that live on servers and of which a step moves what it touches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Embedding"]

Optimizer = Literal["rowwise_adagrad", "adagrad", "adamw", "sgd"]
_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adamw", "sgd")


class Rows(Protocol):
    """Where an `Embedding` gets its rows from."""

    def __call__(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of these ids, of shape (n,), unlike, rising: shape (n, width), on their device."""
        ...


class Embedding(nn.Module):
    """Rows by id, as `torch.nn.Embedding` has them, of a table that no worker has as a whole.

    The job says by `servers` how many processes hold the tables' rows. Of a step only the rows that
    its samples name travel, and their gradients. A row is there once a step has named it: ids are
    any int64 numbers, e.g. hashes, and how many there are need not be known. A row's first values
    depend on its id, on the table's name in the model and on the job's seed alone.

    It has no parameters: the servers update rows, by an optimizer of the table's own. What
    `job.clip_norm` clips includes the rows' gradients.

        self.users = raycloud.Embedding(32)
        vectors = self.users(batch["user"])  # int64 of shape (samples,): (samples, 32)

    Args:
        width: Values of a row.
        optimizer: `rowwise_adagrad` keeps one number a row, `adagrad` one a value, `adamw` two,
            `sgd` none. Those that count steps count a row's own.
        lr: The rows' learning rate. No schedule changes it.
        betas: Of `adamw`.
        eps: Added to what an update is divided by.
        weight_decay: Times `lr`, what a row loses of itself with each of its updates.
        spread: First values are drawn evenly from -spread to spread.
        admit_after: A row is there once so many steps have named it; before, its first values are
            all that is read, and gradients are dropped.
        expire_steps: A row that none of so many steps has named is forgotten. None: none is.
        dtype: float32 or float64.

    Raises:
        ValueError: A value cannot be.
    """

    def __init__(  # noqa: PLR0913 - as torch's modules and optimizers have them
        self,
        width: int,
        *,
        optimizer: Optimizer = "rowwise_adagrad",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        spread: float = 0.05,
        admit_after: int = 1,
        expire_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("width", width, 1),
            ("admit_after", admit_after, 1),
            ("expire_steps", 1 if expire_steps is None else expire_steps, 1),
            ("lr", lr, 0.0),
            ("eps", eps, 0.0),
            ("weight_decay", weight_decay, 0.0),
            ("spread", spread, 0.0),
        ):
            if not least <= value < math.inf:
                raise ValueError(f"{name} is {value}: it is at least {least}, and finite")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas are {betas}: each is at least 0, and less than 1")
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer is {optimizer!r}: it is one of {', '.join(_OPTIMIZERS)}")
        if dtype not in {torch.float32, torch.float64}:
            raise ValueError(f"dtype is {dtype}: it is torch.float32 or torch.float64")
        self.width, self.dtype = width, dtype
        self.optimizer, self.lr, self.betas, self.eps = optimizer, lr, betas, eps
        self.weight_decay, self.spread = weight_decay, spread
        self.admit_after, self.expire_steps = admit_after, expire_steps
        self._rows: Rows | None = None
        self._name = ""

    def bind(self, name: str, rows: Rows) -> None:
        """Get rows from here, by this name of the table; raycloud calls it."""
        self._name, self._rows = name, rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids`, int64 of any shape: that shape, and `width`.

        Raises:
            RuntimeError: It is not part of a job.
            TypeError: The ids are not int64.
        """
        if self._rows is None:
            raise RuntimeError(
                "raycloud.Embedding has rows only in a job: train it with raycloud.train"
            )
        if ids.dtype != torch.int64:
            raise TypeError(f"ids are {ids.dtype}: give torch.int64")
        unlike, places = torch.unique(ids.detach(), return_inverse=True)
        return nn.functional.embedding(places, self._rows(self._name, unlike))

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{self.width}, optimizer={self.optimizer!r}, lr={self.lr:g}"

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Embedding:  # noqa: FBT001, FBT002 - as torch has it
        """Nothing to move: rows come to where the ids are."""
        del fn, recurse
        return self
