"""A member that exchanges by servers: what it cannot do, and servers that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycloud.checkpoint import open_store
from raycloud.clock import SystemClock
from raycloud.errors import TaskError
from raycloud.server.parameters import ParameterActs
from raycloud.server.serving import Server
from raycloud.step.collate import PartialStep
from raycloud.step.replica import Replica
from tests.live import wait_for
from tests.lockstep import NetTask, job


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"norm": True, "double": False}, "'norm.num_batches_tracked' first, which workers"),
        ({"double": True}, "'first.weight' is of torch.float64, and servers hold fp32"),
    ],
)
def test_what_servers_cannot_hold_is_refused(given: dict[str, Any], says: str) -> None:
    asked = job(sync={"topology": "servers", "staleness": 2}, servers=2)
    with pytest.raises(TaskError, match=says) as refused:
        Replica(asked, NetTask(**given), device=torch.device("cpu"), steps=8, clock=SystemClock())
    assert "another sync.topology" in refused.value.hint


class Alone:
    """One member with servers on real sockets, and no other member."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.servers = [self.started(at) for at in range(3)]
        asked = job(sync={"topology": "servers", "staleness": 2}, servers=3)
        task, cpu = NetTask(double=False), torch.device("cpu")
        replica = Replica(asked, task, device=cpu, steps=8, clock=SystemClock())
        assert replica.asynchronous is not None
        self.part = replica.asynchronous
        self.part.serve(lambda *_, **__: [[one.place] for one in self.servers])
        self.lane: Any = SimpleNamespace(
            transport=SimpleNamespace(rank=0, size=1), gather=lambda told: [told]
        )

    def started(self, at: int) -> Server:
        return Server(at, 3, open_store(self.place), "127.0.0.1", parameters=True)

    def enter(self, generation: int) -> PartialStep | None:
        self.part.hang_up()  # as where the generation before has broken
        return self.part.enter(generation, 0, self.lane, planned=False)[0]

    def begin(self) -> None:
        """The round: its parameters are put."""
        self.part.before_step(0, PartialStep(step=0), torch.tensor(0.0))

    def send(self) -> None:
        """What the member has done with its first micro-batch."""
        span = SimpleNamespace(samples=2)
        whole: Any = SimpleNamespace(micro_batches=[span], spans=[span])
        kept = PartialStep(step=0, micro_batches=(0,), weight=2.0)
        self.part.after_step(0, whole, kept, torch.tensor(1.0))
        self.part.give(2.0)

    def held(self, *which: int) -> torch.Tensor:
        """What servers hold of the parameters, one after the other."""
        return torch.cat([self.acts(at).shard.whole() for at in which])

    def acts(self, at: int) -> ParameterActs:
        put: Any = self.servers[at]._acts["put"]
        acts = put.__self__
        assert isinstance(acts, ParameterActs)
        return acts


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    one = Alone(tmp_path)
    yield one
    one.part.close()
    for server in one.servers:
        server.close()


def test_a_generation_goes_on_with_the_servers_that_are_left(alone: Alone) -> None:
    alone.enter(1)
    alone.begin()
    flat = alone.part._flat().clone()
    assert torch.equal(alone.held(0, 1, 2), flat)
    alone.send()
    alone.servers[1].close()
    assert alone.enter(2) is None  # a third of what was sent is gone: the round is computed again
    alone.begin()
    assert torch.equal(alone.held(0, 2), flat)
    alone.send()
    claim = alone.enter(3)  # the same servers: what they have counts
    assert claim is not None
    assert claim.micro_batches == (0,)
    assert not alone.part.returned
    alone.servers[1] = alone.started(1)
    wait_for("the server that is there again", lambda: alone.part.returned)
    assert alone.enter(4) is None
    assert not alone.part.returned
    alone.begin()
    assert torch.equal(alone.held(0, 1, 2), alone.part._flat())


def test_what_a_server_has_of_another_cut_does_not_count(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was out of reach for a generation has an update of the round as it was before."""
    alone.enter(1)
    alone.begin()
    alone.send()
    look = alone.part._look
    with monkeypatch.context() as patch:
        unreached = (1, 0)
        patch.setattr(
            alone.part, "_look", lambda name, told: None if name == unreached else look(name, told)
        )
        assert alone.enter(2) is None
        alone.begin()
        alone.send()
    assert alone.acts(1).shard.leases.keys() == alone.acts(0).shard.leases.keys()
    assert alone.enter(3) is None
