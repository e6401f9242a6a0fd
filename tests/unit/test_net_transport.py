"""Members compare what they start from, and take it from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.net.gloo import GlooTransport
from raycloud.net.lane import Lane
from raycloud.net.transport import Abandoned, take_from
from raycloud.recovery.quorum import same_everywhere
from raycloud.step.state import digest
from tests.lockstep import never
from tests.loopback import Loopback
from tests.sockets import gloo_members, together


def answers(members: Sequence[GlooTransport], digests: Sequence[str]) -> list[bool]:
    return together(
        partial(same_everywhere, Lane(member), text)
        for member, text in zip(members, digests, strict=True)
    )


def test_every_member_gets_the_same_answer() -> None:
    with gloo_members(3) as members:
        assert answers(members, ["ffffffffffffffff"] * 3) == [True] * 3
        assert answers(members, ["0" * 16] * 3) == [True] * 3
        assert answers(members, ["0" * 16, "0" * 16, "0" * 11 + "1" + "0" * 4]) == [False] * 3
        # The middle one is the mean of the others: it alone would see no difference.
        assert answers(members, [f"{n:06x}{n:06x}0000" for n in (1, 2, 3)]) == [False] * 3


def test_a_member_alone_agrees_with_itself() -> None:
    (member,) = Loopback(1).members
    assert same_everywhere(Lane(member), "0123456789abcdef")


def test_asking_ends_when_the_generation_is_over() -> None:
    with pytest.raises(Abandoned):
        same_everywhere(Lane(Loopback(2).members[0], lambda: True), "0123456789abcdef")


def state(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, 4, generator=draw)
    return {
        "model/weight": wide,
        "model/turned": torch.randn(4, 3, generator=draw).t(),  # not contiguous
        "model/half": torch.randn(5, generator=draw).to(torch.bfloat16),
        "model/mask": torch.randn(5, generator=draw) > 0,
        "model/batches": torch.tensor(seed),
        "model/empty": torch.zeros(0, 3),
        "optimizer/weight/step": torch.tensor(float(seed)),
    }


@pytest.mark.parametrize("source", [0, 2])
def test_all_take_from_one_in_place(source: int) -> None:
    with gloo_members(3) as members:
        states = [state(seed) for seed in range(3)]
        held = [dict(one) for one in states]
        together(
            partial(take_from, source, mine, member, never)
            for member, mine in zip(members, states, strict=True)
        )
        for mine, before in zip(states, held, strict=True):
            assert digest(mine.items()) == digest(state(source).items())
            assert all(mine[name] is before[name] for name in mine)


@pytest.mark.parametrize("tensors", [1, 2])
def test_where_it_breaks_nothing_is_taken_and_nothing_is_written_to(tensors: int) -> None:
    hub = Loopback(2)
    mine = {f"model/{n}": torch.zeros(3) for n in range(tensors)}
    hub.members[1].broadcast(torch.ones(3), 1)  # the first arrives, the second never does
    if tensors == 1:
        hub.cut("a member died")
    with pytest.raises((TransportError, Abandoned)):
        take_from(1, mine, hub.members[0], lambda: True)
    assert all(torch.equal(tensor, torch.zeros(3)) for tensor in mine.values())
