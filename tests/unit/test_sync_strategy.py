"""A strategy that somebody adds: one class, and members in trouble go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycloud.commands import Form
from raycloud.events import MemberCaughtUp, MemberDone
from raycloud.net.transport import Transport, Work
from raycloud.step.replica import Replica
from raycloud.sync.buckets import Bucket
from raycloud.sync.gradients import GradientExchange
from raycloud.sync.strategy import STRATEGIES, AllReduce
from tests.crew import Crew, assert_same, parts, reference
from tests.fellows import Fellows
from tests.lockstep import Fleet, NetTask, difference, job
from tests.loopback import Loopback
from tests.unit.test_recovery_catch_up import asked, begin

ROUNDED = 2.0**-7  # bfloat16 has eight bits


class HalfReduce(AllReduce):
    """Sends bfloat16, of which the sums are rounded alike everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[Bucket, torch.Tensor] = {}

    def connect(self, transport: Transport) -> None:
        super().connect(transport)
        self._sent.clear()

    def start(self, bucket: Bucket) -> Work | None:
        half = self._sent[bucket] = bucket.flat.bfloat16()
        if self._transport is None or self._transport.size == 1:
            return None
        return self._transport.all_reduce(half)

    def finish(self, bucket: Bucket) -> None:
        bucket.flat.copy_(self._sent.pop(bucket))

    def bytes_sent(self, bucket: Bucket) -> int:
        return super().bytes_sent(bucket) * 2 // bucket.flat.element_size()


@pytest.fixture
def _halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "none", HalfReduce)


def test_it_sums_and_flags_and_what_was_used_are_exact_beside_it() -> None:
    dealt = [parts(2), parts(1, seed=1), []]
    dealt[0][0] = parts(1, seed=4)[0]
    crew, exact = Crew(3), Crew(3)
    crew.exchanges = [
        GradientExchange(list(m.named_parameters()), bucket_bytes=128, strategy=HalfReduce())
        for m in crew.models
    ]
    crew.connect(Loopback(3))
    for one in (crew, exact):
        one.compute(dealt, at_hand=lambda rank: True)
    sent, sent_exactly = crew.collect()[0], exact.collect()[0]
    assert sent.agreed
    assert_same(crew.models[0], reference(dealt), tolerance=0.2)
    with pytest.raises(AssertionError):
        assert_same(crew.models[0], reference(dealt))
    assert abs(sent.norm / sent_exactly.norm - 1.0) < ROUNDED
    assert sent.bytes_sent < sent_exactly.bytes_sent / 3.0  # of float64


@pytest.mark.usefixtures("_halved")
@pytest.mark.parametrize("during", ["lane", "gradients", "after"])
def test_those_that_survive_go_on_with_it(during: str) -> None:
    fleet = Fleet(job(), NetTask(norm=True), (3, 3, 2))
    for step in range(4):
        if step == 2:
            fleet.lose(1, step, during=during)
        else:
            fleet.step(step)
    one, other = fleet.replicas
    assert difference(one.model, other.model) == 0.0


def ran(fellows: Fellows, folder: Path, *members: int) -> list[Replica]:
    (folder / "gate").touch()
    fellows.until(MemberDone, members)
    return [fellows.replica(member) for member in members]


@pytest.mark.usefixtures("_halved")
def test_a_newcomer_takes_what_the_others_have_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fellows = Fellows(tmp_path / "kept", asked(tmp_path), 2)
    begin(fellows)
    fellows.until(MemberCaughtUp, (2,))
    first, *others = ran(fellows, tmp_path, 0, 1, 2)
    assert [difference(first.model, other.model) for other in others] == [0.0, 0.0]
    monkeypatch.setitem(STRATEGIES, "none", AllReduce)
    folder = tmp_path / "exact"
    folder.mkdir()
    alone = Fellows(folder / "kept", asked(folder), 1, joining=0)
    alone.form(Form(generation=0, members=(0,), shares=(8,), step=0))
    (exact,) = ran(alone, folder, 0)
    assert 0.0 < difference(first.model, exact.model) < 0.1
