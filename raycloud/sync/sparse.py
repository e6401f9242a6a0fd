"""Sparse gradients, as of `nn.Embedding(sparse=True)`: only rows travel that some member touches.

First all learn which rows those are, by one number for each row of the parameter; then the rows are
summed, as a dense matrix of them alone. So of a parameter of R rows of W values, of which a step
touches U, an exchange sums R + U W numbers in the place of R W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from raycloud.errors import TaskError
from raycloud.net.transport import finish

if TYPE_CHECKING:
    from raycloud.net.transport import Transport, Work

SPARSE = nn.Embedding, nn.EmbeddingBag


def sparse_parameters(model: nn.Module) -> set[int]:
    """The identities of parameters whose gradients are sparse.

    >>> len(sparse_parameters(nn.Embedding(4, 2, sparse=True)))
    1
    """
    of = (module for module in model.modules() if isinstance(module, SPARSE))
    return {id(module.weight) for module in of if module.sparse}


class SparseRows:
    """The sparse gradient of a parameter, while it is exchanged.

    Order of calls, each step: `start`, once all backward passes are over; then, once what it has
    returned is complete, `collect`, which exchanges the rows; the mean gradient is in place then.

    Args:
        name: Of the parameter in the model.
        parameter: Two-dimensional.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self._touched = self._ids = self._values = torch.empty(0)
        self._sum: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Of the gradient, were it dense."""
        return self.parameter.numel() * self.parameter.element_size()

    def start(self, transport: Transport | None, scale: float) -> Work | None:
        """Begin to find out which rows any member touches; None: nothing travels.

        This member's own gradient stays as it is; what travels is multiplied by `scale`.

        Raises:
            TransportError: The connections are broken.
            TaskError: The gradient is dense.
        """
        like, grad = self.parameter, self.parameter.grad
        if grad is None:
            self._ids = torch.zeros(0, dtype=torch.int64, device=like.device)
            self._values = torch.zeros((0, like.shape[1]), dtype=like.dtype, device=like.device)
        elif not grad.is_sparse:
            raise TaskError(
                f"the gradient of {self.name!r} is dense, though its embedding has sparse=True: "
                "something else uses the parameter, too",
                hint="construct the embedding with sparse=False",
            )
        else:
            own = grad.coalesce()
            self._ids, self._values = own.indices()[0], own.values() * scale
        self._touched = torch.zeros(len(like), device=like.device)  # new: an older may be lent
        self._touched[self._ids] = 1.0
        if transport is None or transport.size == 1:
            return None
        return transport.all_reduce(self._touched)

    def collect(
        self, transport: Transport | None, abandoned: Callable[[], bool]
    ) -> tuple[float, int]:
        """Sum the rows; returns the norm of the sum, and the bytes that this member has sent.

        Raises:
            TransportError: The exchange broke, or was abandoned; the own gradient is untouched.
        """
        ids, like = self._touched.nonzero()[:, 0], self.parameter
        values = torch.zeros((len(ids), like.shape[1]), dtype=like.dtype, device=like.device)
        values[torch.searchsorted(ids, self._ids)] = self._values
        sent = 0
        if transport is not None and transport.size > 1:
            sent = transport.all_reduce_bytes(self._touched.nbytes)
            if len(ids):
                finish(transport.all_reduce(values), abandoned)
                sent += transport.all_reduce_bytes(values.nbytes)
        self._sum = None
        if len(ids):  # rising, and each once
            self._sum = torch.sparse_coo_tensor(
                ids[None], values, like.shape, is_coalesced=True, check_invariants=False
            )
        return float(torch.linalg.vector_norm(values)), sent

    def install(self) -> None:
        """Make the sum the parameter's gradient; of no rows there is none."""
        self.parameter.grad, self._sum = self._sum, None

    def clip(self, factor: float) -> None:
        """Multiply the gradient that is in place."""
        if (grad := self.parameter.grad) is not None:
            grad.mul_(factor)
