"""Members that exchange gradients by hand, and the single process they must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raycloud.sync.gradients import Exchanged, GradientExchange
from raycloud.sync.strategy import AllReduce
from tests.lockstep import never
from tests.loopback import Loopback


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch: its weight, its input, and which layers of a `Rooms` it goes through."""

    weight: float
    x: Tensor
    through: tuple[int, ...] = (0, 1, 2)


class Rooms(nn.Module):
    """Three layers side by side; a part goes through some of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, width: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def loss(self, part: Part) -> Tensor:
        """Its mean loss; through no layer at all it has no gradient anywhere but zeros."""
        total = sum((self.layers[i](part.x).square().mean() for i in part.through), start=0)
        assert isinstance(total, Tensor)
        return total


def parts(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Part]:
    """Random micro-batches of different weight, through all layers."""
    draw = torch.Generator().manual_seed(seed)
    return [
        Part(weight=1.0 + i % 3, x=torch.randn(3, 4, generator=draw, dtype=torch.float64).to(dtype))
        for i in range(count)
    ]


def scale(dealt: Sequence[Sequence[Part]]) -> float:
    """One over the weight of a step."""
    return 1.0 / sum(part.weight for mine in dealt for part in mine)


class Crew:
    """Members of one generation, each with a model and its exchange."""

    def __init__(
        self, size: int, *, dtype: torch.dtype = torch.float64, bucket_bytes: int = 128
    ) -> None:
        self.models = [Rooms(dtype) for _ in range(size)]
        self.exchanges = [
            GradientExchange(
                list(model.named_parameters()), bucket_bytes=bucket_bytes, strategy=AllReduce()
            )
            for model in self.models
        ]
        self.connect(Loopback(size))

    def connect(self, hub: Loopback) -> None:
        """Exchange over `hub` from now on."""
        self.hub = hub
        for exchange, transport in zip(self.exchanges, hub.members, strict=True):
            exchange.connect(transport)

    def compute(
        self,
        dealt: Sequence[Sequence[Part]],
        ranks: Sequence[int] = (),
        at_hand: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Each member, or those of `ranks`, computes its parts and sends its gradients."""
        for rank in ranks or range(len(self.models)):
            model, mine = self.models[rank], dealt[rank]
            for part in mine[:-1]:
                (model.loss(part) * part.weight).backward()
            self.exchanges[rank].begin(scale(dealt))
            for part in mine[-1:]:
                (model.loss(part) * part.weight).backward()
            self.exchanges[rank].send(behind=not at_hand(rank))

    def collect(self) -> list[Exchanged]:
        """All members' gradients are then the mean."""
        return [exchange.collect(never) for exchange in self.exchanges]


def reference(dealt: Sequence[Sequence[Part]], dtype: torch.dtype = torch.float64) -> Rooms:
    """A single process's model with the gradients of the same parts."""
    model = Rooms(dtype)
    accumulate(model, dealt)
    return model


def accumulate(model: Rooms, dealt: Sequence[Sequence[Part]]) -> None:
    """Give a single process's model the gradients of all parts."""
    for mine in dealt:
        for part in mine:
            (model.loss(part) * (part.weight * scale(dealt))).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by name."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-13) -> None:
    """The same parameters have gradients, and they agree."""
    for (name, mine), theirs in zip(gradients(one).items(), gradients(other).values(), strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
