"""How a state is cut into messages, and put together again."""

from __future__ import annotations

import torch

from raycloud.training.handover import hand_over, messages
from tests.lockstep import never
from tests.sockets import gloo_members, together


def test_small_ones_of_a_type_travel_together_and_large_ones_alone() -> None:
    tensors = [
        ("a", "float32", [3, 2]),
        ("b", "float32", []),
        ("c", "int64", [2]),
        ("d", "float32", [2**22]),
        ("e", "float32", [1]),
    ]
    made = [(kind, [name for name, _ in some]) for kind, some in messages(tensors)]
    expected = [("float32", ["a", "b"]), ("int64", ["c"]), ("float32", ["d"]), ("float32", ["e"])]
    assert made == expected
    assert list(messages([])) == []


class State:
    """What a replica's state is to those who hand it over."""

    def __init__(self, tensors: dict[str, torch.Tensor], values: dict[str, int]) -> None:
        self.held, self.kept = tensors, values

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.held

    def values(self) -> dict[str, int]:
        return self.kept

    def load(self, tensors: dict[str, torch.Tensor], values: dict[str, int]) -> None:
        self.held, self.kept = tensors, values


def test_who_takes_it_has_it_whole_and_each_tensor_for_itself() -> None:
    whole = {
        "weight": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "odd": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "used": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    states = [State(dict(whole), {"n": 1}), State({"weight": torch.zeros(1)}, {}), State({}, {})]
    with gloo_members(3) as members:

        def take_part(rank: int) -> object:
            return hand_over(
                states[rank],  # type: ignore[arg-type]
                {"epoch": rank},
                source=0,
                takes=rank == 1,
                transport=members[rank],
                abandoned=never,
            )

        told = together([lambda rank=rank: take_part(rank) for rank in range(3)])
    assert told == [{"epoch": 0}] * 3
    taken, left = states[1], states[2]
    assert (taken.kept, left.held) == ({"n": 1}, {})
    assert list(taken.held) == list(whole)
    for name, tensor in whole.items():
        assert torch.equal(taken.held[name], tensor)
        assert taken.held[name].dtype == tensor.dtype
        assert taken.held[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
