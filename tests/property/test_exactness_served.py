"""The first promise where servers sum: any number of workers, shares and servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycloud.errors import TaskError, TransportError
from raycloud.net import served
from raycloud.recovery.quorum import adopt
from raycloud.server.serving import Server
from raycloud.step.commit import collect, commit
from tests.lockstep import Fleet, NetTask, difference, job, never, plain_loop
from tests.served import ServedFleet, summing
from tests.tiers import variants

FEW = 20  # steps


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """Two; and all but the flags goes by them, small as the model is."""
    monkeypatch.setattr(served, "WHOLE_BYTES", 64)
    with summing(tmp_path, 2) as made:
        yield made


@pytest.mark.parametrize(
    "shares", variants(((5, 2, 1),), ((8,),), ((5, 3),), ((8, 0),), fast=3), ids=str
)
@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
def test_float64_adamw_with_dropout_is_the_single_process(
    servers: list[Server], shares: tuple[int, ...], norm: bool
) -> None:
    task = NetTask(norm=norm)
    fleet = ServedFleet(servers, task, shares)
    for step in range(50):
        fleet.step(step)
    reference = plain_loop(fleet.job, task, 50)
    assert all(difference(one.model, reference) <= 1e-9 for one in fleet.replicas)
    fleet.close()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_with_a_codec_all_are_alike_and_near(servers: list[Server], codec: str) -> None:
    task = NetTask(double=False)
    fleet = ServedFleet(servers, task, (5, 2, 1), sync={"codec": codec})
    for step in range(50):
        fleet.step(step)
    first, *others = (replica.model.state_dict() for replica in fleet.replicas)
    assert all(torch.equal(one[name], first[name]) for one in others for name in first)
    assert difference(fleet.replicas[0].model, plain_loop(fleet.job, task, 50)) <= 0.1
    fleet.close()


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_server_that_is_lost_in_a_step_costs_nothing(servers: list[Server], codec: str) -> None:
    """The exchange is made anew of what workers have computed, by the servers that are left."""
    task = NetTask(double=codec == "none")
    fleet = ServedFleet(servers, task, (5, 3), sync={"codec": codec})
    for step in range(8):
        fleet.step(step)
    servers.pop(0).close()  # small as the model is, all goes by the first
    span = fleet.span(8, fleet.position)
    fleet.compute(8)
    have = [-1] * len(span.micro_batches)
    for rank, replica in enumerate(fleet.replicas):
        with pytest.raises(TransportError):
            collect(replica, 8, never)
        assert replica.kept is not None
        replica.suspend()
        for k in replica.kept.micro_batches:
            have[k] = rank
    assert -1 not in have
    fleet.join(fleet.replicas, fleet.shares)
    works = fleet.compute(8, adopted=adopt(have, fleet.shares))
    assert not any(work.micro_batches for work in works)
    for replica, work in zip(fleet.replicas, works, strict=True):
        collect(replica, 8, never)
        commit(replica, work)
    fleet.position = fleet.steps.after(span)
    for step in range(9, FEW):
        fleet.step(step)
    apart = difference(fleet.replicas[0].model, plain_loop(fleet.job, task, FEW))
    assert apart <= (1e-9 if codec == "none" else 0.1)
    fleet.close()


def test_a_gradient_that_no_server_could_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float64, and while one of the servers is lost."""
    monkeypatch.setattr("raycloud.step.servers.MOST_BYTES", 1024)
    monkeypatch.setattr("raycloud.net.exchange.ALIGNED", 1)  # else all is one part
    served = {"topology": "servers"}
    with pytest.raises(TaskError, match=r"the gradient of '[\w.]+' has \d+ bytes") as raised:
        Fleet(job(sync=served, servers=1), NetTask(), (8,))
    enough = int(raised.value.hint.split("servers: ")[1].split(",")[0])
    Fleet(job(sync=served, servers=enough), NetTask(), (8,))
