"""Replicas are compared by digest; drift is named, and what is rounding alone is aligned."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raycloud.clock import VirtualClock
from raycloud.commands import Form
from raycloud.errors import TaskError
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady, Noticed
from raycloud.net.lane import Lane, LaneDigest, LaneReport
from raycloud.step import consistency, mutation, replica
from raycloud.step.consistency import Consistency, bound, sketch
from raycloud.step.mutation import fingerprints
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Steady
from tests.lockstep import Fleet, NetTask, difference, job
from tests.loopback import Loopback

MEMBERS = (4, 5, 9)


class Trio:
    """Three replicas after some steps, and what compares them."""

    def __init__(self, *, steps: int = 3, unlike: bool = False, sgd: bool = False) -> None:
        task = NetTask(dropout=0.0, norm=True, double=False, sgd=sgd)
        self.fleet = Fleet(job(), task, (4, 3, 1))
        self.step = 0
        self.clock = VirtualClock()
        self.notices: list[tuple[str, Any]] = []
        self.replicas = self.fleet.replicas
        self.lanes = [Lane(member) for member in Loopback(3).members]
        self.compared = [Consistency(replica, self.clock) for replica in self.replicas]
        for rank, (one, own) in enumerate(zip(self.compared, self.replicas, strict=True)):
            own.notice = lambda what, detail: self.notices.append((what, detail))
            one.enter(MEMBERS, rank, 0, unlike=unlike)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.fleet.step(self.step)
            self.step += 1

    def compare(self, *, last: bool = False, look: bool = True) -> list[LaneReport]:
        """Look, say it on the lane, and settle, as members in threads of their own do."""

        def one(rank: int) -> LaneReport:
            own, lane = self.compared[rank], self.lanes[rank]
            if look:
                own.look(self.step)
            lane.send(LaneReport(weight=1.0, digest=own.told(self.step)))
            heard = lane.read()
            own.heard(heard)
            own.settle(self.step, lane, last=last)
            return heard

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(one, range(3)))

    def state(self, rank: int) -> dict[str, Tensor]:
        return self.replicas[rank].state.tensors()


def nudge(tensor: Tensor, at: int = 0) -> None:
    """Let one element be the next number."""
    flat = tensor.view(-1)
    flat[at] = torch.nextafter(flat[at], flat[at] + 1)


def test_equal_replicas_give_the_same_digest() -> None:
    trio = Trio()
    [first, *_] = trio.compare()
    assert first.digest.given == 3
    assert first.digest.same
    assert trio.notices == []


@pytest.mark.parametrize(
    "name",
    [
        "model/first.weight",
        "model/norm.running_var",
        "optimizer/last.bias/exp_avg_sq",
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_one_bit_ends_the_run_with_the_tensor_and_the_members(name: str, rank: int) -> None:
    trio = Trio()
    trio.compare()
    trio.train(1)
    nudge(trio.state(rank)[name])
    others = ", ".join(str(m) for m in MEMBERS if m != MEMBERS[rank])
    with pytest.raises(TaskError) as drifted:
        trio.compare()
    said = f"{name!r} differs on member {MEMBERS[rank]} from members {others}"
    assert said in drifted.value.message
    assert "before step 4" in drifted.value.message
    assert "they were equal before step 3" in drifted.value.message
    assert "optimizer hooks" in drifted.value.hint


def test_who_has_no_state_yet_is_not_compared() -> None:
    trio = Trio()
    nudge(trio.state(1)["model/first.weight"])
    trio.replicas[1].following = object()  # type: ignore[assignment]
    [first, *_] = trio.compare()
    assert (first.digest.given, first.digest.same) == (2, True)
    nudge(trio.state(2)["model/first.weight"])
    trio.train(0)
    trio.step += 1
    with pytest.raises(TaskError, match=r"'model/first.weight' differs on member 9 from member 4"):
        trio.compare()


def test_other_tensors_are_drift_too() -> None:
    trio = Trio()
    parameter = trio.replicas[0].model.get_parameter("last.bias")
    trio.replicas[0].optimizer.state[parameter]["more"] = torch.zeros(1)
    with pytest.raises(TaskError, match="hold other tensors on member 4 from members 5, 9"):
        trio.compare()


def test_digests_are_made_where_all_would_and_seldom_where_they_take_long() -> None:
    trio = Trio()
    assert [heard.digest.holds_off for heard in trio.compare(look=False)] == [3.0] * 3
    trio.clock.advance(1.0)
    trio.compared[1]._due_s += 1.0  # it takes this one longer
    assert [heard.digest.holds_off for heard in trio.compare(look=False)] == [1.0] * 3
    assert all(one._digest is None for one in trio.compared)
    trio.clock.advance(1.0)
    [first, *_] = trio.compare(look=False)
    assert (first.digest.holds_off, first.digest.given) == (0.0, 0.0)
    [first, *_] = trio.compare(look=False)  # made after that step, told with the next message
    assert (first.digest.given, first.digest.same) == (3, True)
    fingerprint = consistency.fingerprints

    def slowly(tensors: Any) -> list[int]:
        trio.clock.advance(0.1)
        return fingerprint(tensors)

    one = trio.compared[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "fingerprints", slowly)
        one.look(trio.step + 1)
    assert one._due_s - trio.clock.monotonic_s() == pytest.approx(20.0)  # half a percent


def test_replicas_on_unlike_processors_are_aligned_where_only_rounding_differs() -> None:
    trio = Trio(steps=0, unlike=True)
    draw = torch.Generator().manual_seed(4)

    def rounds(parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for p in parameters:
                other = torch.nextafter(p, torch.full_like(p, math.inf))
                p.copy_(torch.where(torch.rand(p.shape, generator=draw) < 0.3, other, p))

    optimizer = trio.replicas[1].optimizer
    mine = list(trio.replicas[1].model.parameters())
    optimizer.register_step_post_hook(lambda *_: rounds(mine))
    trio.train(20)
    apart = difference(trio.replicas[0].model, trio.replicas[1].model)
    assert apart > 0
    trio.compare()  # it is not time yet
    assert difference(trio.replicas[0].model, trio.replicas[1].model) == apart
    before = {name: t.clone() for name, t in trio.state(0).items()}
    trio.clock.advance(60.0)
    trio.train(1)
    trio.compare()
    for rank in range(3):
        assert all(torch.equal(trio.state(rank)[n], t) for n, t in trio.state(0).items())
    assert before.keys() == trio.state(0).keys()
    [(what, detail)] = trio.notices
    assert "aligned" in what
    assert (detail["step"], detail["since_step"]) == (21, 0)
    assert 0 < detail["largest_difference"] < 1e-5
    trio.train(3)
    trio.compare(last=True)  # the last step does not wait for its time
    assert len(trio.notices) == 2
    assert trio.notices[1][1]["since_step"] == 21
    assert difference(trio.replicas[0].model, trio.replicas[1].model) == 0.0


@pytest.mark.parametrize("sgd", [False, True])
def test_drift_is_an_error_on_unlike_processors_too(sgd: bool) -> None:
    trio = Trio(steps=0, unlike=True, sgd=sgd)
    third = trio.replicas[2]
    own = third.model.get_parameter("last.weight")

    def moves(*_: object) -> None:
        """As a parameter that is not exchanged: by the member's own gradient."""
        with torch.no_grad():
            own.add_(torch.sign(own), alpha=1e-3)

    third.optimizer.register_step_post_hook(moves)
    trio.train(5)
    with pytest.raises(TaskError, match=r"'model/last.weight' differs on member 9 from member 4"):
        trio.compare(last=True)


_APART = """
import sys
import torch
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
shapes, steps = [(300, 40), (40,), (8, 8, 3)], 40
found = {"capability": torch.backends.cpu.get_cpu_capability()}
for kind in ("AdamW", "SGD", "RMSprop", "Adagrad"):
    parameters = [torch.nn.Parameter(torch.randn(s, generator=draw)) for s in shapes]
    start = [p.detach().clone() for p in parameters]
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2, weight_decay=0.1, **more)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=draw) * 0.1
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    found[kind] = (start, [p.detach() for p in parameters])
torch.save(found, sys.argv[1])
"""


@pytest.mark.full(only="a processor without AVX")
def test_a_real_unlike_processor_stays_within_the_bound(tmp_path: Path) -> None:
    """The same gradients on this processor, with the instructions it has and with the least."""
    found = []
    for name, more in (("own", {}), ("least", {"ATEN_CPU_CAPABILITY": "default"})):
        path = tmp_path / name
        command = [sys.executable, "-c", _APART, str(path)]
        subprocess.run(command, check=True, env={**os.environ, **more}, timeout=100)
        found.append(torch.load(path))
    own, least = found
    if own.pop("capability") == least.pop("capability"):
        pytest.skip("this processor has no other instructions than the least")
    differing = 0
    for kind in own:
        for start, one, other in zip(*own[kind], least[kind][1], strict=True):
            apart, moved = float((one - other).norm()), float((one - start).norm())
            most = bound(2.0**-23, 40, norm=float(one.norm()), moved=moved)
            assert apart <= most / 4, kind  # far below
            assert most < moved / 4, kind  # what is trained apart is above
            differing += apart > 0
    assert differing >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (7, 9001), (0, 4)])
def test_a_fingerprint_is_of_the_bytes_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    tensor = (torch.randn(shape, generator=draw) * 9).to(dtype)
    [found] = fingerprints([tensor])
    room = torch.zeros(tensor.numel() + 3, dtype=dtype)
    elsewhere = room[3:].view(shape)
    elsewhere.copy_(tensor)
    assert fingerprints([elsewhere]) == [found]
    assert fingerprints([tensor.t().contiguous().t() if tensor.dim() == 2 else tensor]) == [found]
    for at in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
        other = tensor.clone()
        other.view(-1)[at] = ~other.view(-1)[at] if dtype is torch.bool else other.view(-1)[at] + 1
        assert fingerprints([other]) != [found], at


def test_fingerprints_are_of_tensors_of_a_kind_of_its_own_too() -> None:
    class Quantized(torch.Tensor):
        """As a library's optimizer may keep its state."""

    one, other = (torch.randn(9).as_subclass(Quantized) for _ in range(2))
    assert fingerprints([one]) == fingerprints([one.clone()]) != fingerprints([other])


def test_fingerprints_are_of_tensors_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Adam keeps its counts on the CPU, where the model is on a GPU."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
        assert len({one.device for one in tensors}) == 1, "torch refuses it"
        return plainly([one.as_subclass(torch.Tensor) for one in tensors])

    plainly, one = torch.stack, mutation._fingerprint
    tensors = [torch.full((n,), float(n)) for n in range(5)]
    wanted = fingerprints(tensors)
    monkeypatch.setattr(torch, "stack", stack)
    monkeypatch.setattr(
        mutation,
        "_fingerprint",
        lambda t: one(t).as_subclass(Elsewhere) if t.numel() % 2 else one(t),
    )
    assert fingerprints(tensors) == wanted
    assert len(set(wanted)) == 5


def test_sums_of_words_tell_whether_all_are_the_same() -> None:
    def summed(*words: tuple[float, ...]) -> LaneDigest:
        each = [LaneDigest.of(one, holds_off=0.0) for one in words]
        total = [sum(values) for values in zip(*(one.words for one in each), strict=True)]
        squares = [sum(values) for values in zip(*(one.squares for one in each), strict=True)]
        given = float(len(words))
        return LaneDigest(given=given, words=tuple(total), squares=tuple(squares))

    most = float(2**16 - 1)
    assert summed(*[(most, 1.0, most)] * 5000).same
    assert not summed((most, 1.0, most), *[(most, 1.0, most - 1)] * 4999).same
    assert not summed((0.0, 2.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0)).same


@pytest.mark.parametrize("size", [1, 100, 4096, 50_000])
def test_a_sketch_tells_how_long_a_tensor_is(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    for _ in range(5):
        values = torch.randn(size, generator=draw)
        estimate = float(sketch(values).square().mean().sqrt())
        assert 0.3 < estimate / float(values.norm()) < 2.0


class Drifts(Steady):
    """What is built second adds something of its own to a parameter after each update."""

    made = 0

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        Drifts.made += 1
        if Drifts.made == 2:
            tensor = model.get_parameter("last.bias")
            optimizer.register_step_post_hook(lambda *_: nudge(tensor.detach()))
        return optimizer


def events_until(fellows: Fellows, ended: Callable[[Event], bool], many: int) -> list[Event]:
    end, pause, found = time.monotonic() + WAIT_S, threading.Event(), []
    while sum(map(ended, found)) < many:
        for member in fellows.members:
            found += member.poll(0.0)
        assert time.monotonic() < end, found
        pause.wait(0.005)
    return found


@pytest.mark.parametrize("every", [2, None])
def test_drift_ends_a_run_of_real_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    """At the checkpoint of step 2, which the next message tells of; or at the last step."""
    monkeypatch.setattr(Drifts, "made", 0)
    settings = {"dropout": 0.0}
    asked = job(task=Drifts, steps=5, settings=settings, checkpoint={"every_steps": every})
    fellows = Fellows(tmp_path, asked, count=2, joining=0, task=Drifts)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    found = events_until(fellows, lambda one: isinstance(one, MemberFailed), 2)
    failed = [event for event in found if isinstance(event, MemberFailed)]
    assert {event.member for event in failed} == {0, 1}
    for event in failed:
        assert event.error == "TaskError"
        assert "'model/last.bias' differs on member" in event.message
        assert f"before step {3 if every else 5}" in event.message


def test_real_members_on_unlike_processors_end_with_one_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drifts, "made", 0)
    kinds = iter(("one", "another"))
    monkeypatch.setattr(replica, "processor", lambda device: next(kinds))
    asked = job(task=Drifts, steps=5, settings={"dropout": 0.0})
    fellows = Fellows(tmp_path, asked, count=2, joining=0, task=Drifts)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    fellows.until(MemberDone, (0, 1))
    one, other = (fellows.replica(member).state.tensors() for member in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    [told] = [event for event in fellows.of(Noticed) if "aligned" in event.what]
    assert (told.member, told.detail["step"], told.detail["since_step"]) == (0, 5, 0)
    assert told.detail["tensor"] == "model/last.bias"
    assert all(ready.processor for ready in fellows.of(MemberReady))
