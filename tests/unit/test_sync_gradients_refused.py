"""What an exchange of gradients cannot carry is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raycloud.errors import TaskError
from raycloud.sync.gradients import GradientExchange
from raycloud.sync.strategy import AllReduce
from tests.lockstep import never


class Recomputed(nn.Module):
    """One layer used twice, the second time under activation checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.layer, self.layer(x), use_reentrant=self.reentrant)
        return again.sum()


def exchange(model: nn.Module) -> GradientExchange:
    """Its gradients, ready for the step's last backward pass."""
    made = GradientExchange(list(model.named_parameters()), bucket_bytes=64, strategy=AllReduce())
    made.begin(1.0)
    return made


def test_a_gradient_that_comes_twice_in_one_backward_is_refused() -> None:
    model = Recomputed(reentrant=True)
    exchange(model)
    with pytest.raises(TaskError, match=r"'layer\.\w+' was computed twice") as refused:
        model(torch.ones(2, 3)).backward()
    assert "use_reentrant=False" in refused.value.hint


def test_activation_checkpointing_that_is_not_reentrant() -> None:
    model, alone = Recomputed(reentrant=False), Recomputed(reentrant=False)
    alone.load_state_dict(model.state_dict())
    gradients = exchange(model)
    x = torch.ones(2, 3)
    model(x).backward()
    alone(x).backward()
    gradients.send()
    gradients.collect(never)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("earlier", [False, True], ids=["last pass", "an earlier pass only"])
def test_a_sparse_gradient_is_refused_with_its_name(earlier: bool) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True), "head": nn.Linear(3, 1)})
    loss = model["head"](model["words"](torch.tensor([1, 2]))).sum()
    if earlier:
        loss.backward()
    gradients = exchange(model)
    if earlier:
        loss = model["head"](torch.ones(1, 3)).sum()

    def finish() -> None:
        loss.backward()
        gradients.send()

    with pytest.raises(TaskError, match=r"'words\.weight' is sparse") as refused:
        finish()
    assert "sparse=False" in refused.value.hint
