"""Trying a member out: what is read for it, and what it says of the task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raycloud.clock import SystemClock, VirtualClock
from raycloud.commands import Form
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady, PartWritten
from raycloud.order import Layout, Order
from raycloud.step.collate import Collate
from raycloud.step.replica import Replica
from raycloud.task import Splits, Task
from raycloud.worker import calibration
from raycloud.worker.calibration import Calibration
from raycloud.worker.context import MemberConfig
from raycloud.worker.member import Member
from tests.fellows import Fellows
from tests.lockstep import CPU, NetTask, job

LAYOUT = Layout(partitions=tuple(range(0, 257, 8)), lanes=8, run=2, window=1)


class Asked:
    """Samples that remember what was asked for."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.ids.append(index)
        return self.samples[index]


def trial(
    task: NetTask,
    samples: Any,
    order: Order,
    *,
    member: int = 0,
    clock: Any = None,
    quota: float = 0.0,
    **asked: Any,
) -> Calibration:
    clock = clock or SystemClock()
    wanted = job(elastic={"min_workers": 1, "max_workers": 2, "shares": "auto"}, **asked)
    collate = Collate(task, samples, order, pinned=False)
    replica = Replica(wanted, task, device=CPU, steps=5, clock=clock)
    return Calibration(wanted, replica, collate, member=member, clock=clock, quota=quota)


def rows_of(member: int, layout: Layout | None) -> set[int]:
    task = NetTask(samples=256, dropout=0.0, branch=False)
    samples = Asked(task.data(None).train)
    trial(task, samples, Order(samples=256, seed=1, layout=layout), member=member).speed()
    return set(samples.ids)


@pytest.mark.parametrize("member", [0, 3, 9])
def test_of_blocks_one_lane_is_read(member: int) -> None:
    order = Order(samples=256, seed=1, layout=LAYOUT)
    lane = set(order.lane_partitions(0, member % 8).tolist())
    read = rows_of(member, LAYOUT)
    assert len(read) == 8  # four micro-batches of two, and they are of different steps
    assert {row // 8 for row in read} <= lane


def test_other_samples_are_read_from_the_start_of_the_sequence() -> None:
    order = Order(samples=256, seed=1)
    assert rows_of(5, None) == set(order.ids(0, 0, 8).tolist())


def test_too_few_blocks_for_that_are_read_from_the_start_too() -> None:
    layout = Layout(partitions=tuple(range(0, 33, 4)), lanes=8, run=2, window=1)
    task = NetTask(samples=32, dropout=0.0, branch=False)
    samples = Asked(task.data(None).train)
    order = Order(samples=32, seed=1, layout=layout)
    trial(task, samples, order, member=3).speed()
    assert set(samples.ids) == set(order.ids(0, 0, 8).tolist())


@pytest.mark.parametrize(("quota", "times"), [(0.0, 1.0), (2.0, 1.0), (0.4, 2.5)])
def test_fixed_seconds_are_told_from_those_of_a_micro_batch(quota: float, times: float) -> None:
    """Of virtual time all is a processor's, and a quota would not let it go on."""
    clock = VirtualClock()

    class Slow(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(1.0 + 0.25 * len(batch[1]) / 2)
            return super().loss(model, batch)

    task = Slow(dropout=0.0, branch=False)
    samples = task.data(None).train
    made = trial(task, samples, Order(samples=70, seed=1), clock=clock, quota=quota, fuse=8)
    assert made.speed() == (pytest.approx(1.0 * times), pytest.approx(0.25 * times))


@pytest.mark.parametrize(
    ("fuse", "took", "known"),
    [
        (8, [9.0, 0.3, 0.6], (0.2, 0.1)),  # four in a pass
        (8, [9.0, 0.3, 7.0], (0.0, 0.3)),  # for the first time: it says nothing
        (8, [9.0, 0.3, 0.2], (0.285, 0.015)),
        (8, [9.0, 1.0, 1.7], (0.3, 0.7)),  # two of them, and all four take more than two seconds
        (8, [9.0, 1.0, 1.1, 1.3], (0.9, 0.1)),  # two of them, and then all four
        (8, [9.0, 5.0], (0.0, 5.0)),  # a single one
        (2, [9.0, 0.3, 0.4], (0.0, 0.2)),  # two passes of two
        (1, [9.0, 0.3], (0.0, 0.3)),
    ],
)
def test_whom_others_wait_for_is_measured_briefly(
    fuse: int, took: list[float], known: tuple[float, float]
) -> None:
    clock, seconds = VirtualClock(), iter(took)

    class Counted(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(next(seconds))  # no more passes than these
            return super().loss(model, batch)

    task = Counted(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), clock=clock, fuse=fuse)
    assert made.joining_speed() == pytest.approx(known)
    assert next(seconds, None) is None


@pytest.mark.parametrize(
    ("fixed_s", "micro_batch_s", "fuse", "computed"),
    [
        (0.0, 0.3, 8, 4),
        (0.0, 0.9, 8, 2),
        (0.0, 5.0, 8, 1),
        (0.0, 0.3, 2, 2),
        (0.0, 0.3, 1, 1),
        (0.7, 0.3, 8, 4),
        (1.2, 0.3, 8, 2),
        (3.0, 0.3, 8, 1),
    ],
)
def test_who_joins_computes_what_it_will_in_its_first_step(
    fixed_s: float, micro_batch_s: float, fuse: int, computed: int
) -> None:
    """Four micro-batches of two are half a step, but two seconds are enough."""
    sizes: list[int] = []

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.append(len(batch[1]))
            return super().loss(model, batch)

    task = Sized(dropout=0.0, branch=False)
    order = Order(samples=70, seed=1)
    trial(task, task.data(None).train, order, fuse=fuse).warm_up(fixed_s, micro_batch_s)
    assert sizes == [2 * computed]


@pytest.mark.parametrize("fuse", [1, 2, 3])
def test_no_pass_is_larger_than_the_job_allows(fuse: int) -> None:
    sizes: set[int] = set()

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.add(len(batch[1]))
            return super().loss(model, batch)

    task = Sized(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), fuse=fuse)
    made.warm_up(*made.speed())
    assert max(sizes) == 2 * fuse


def test_what_a_first_pass_and_a_busy_moment_cost_is_left_out() -> None:
    clock, seconds = VirtualClock(), iter([9.0, 0.3, 0.05, 0.05, 0.05, 0.05, 5.0, 0.2, 0.1, 0.4])

    class Uneven(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            clock.advance(next(seconds, 0.1))
            return super().loss(model, batch)

    task = Uneven(dropout=0.0, branch=False)
    made = trial(task, task.data(None).train, Order(samples=70, seed=1), clock=clock, fuse=8)
    fixed_s, micro_batch_s = made.speed()
    assert fixed_s + 4 * micro_batch_s == pytest.approx(0.1)


def test_a_task_that_draws_from_a_global_generator_is_refused() -> None:
    class Draws(NetTask):
        def batch(self, samples: Any, rng: Any) -> Any:
            np.random.rand()
            return super().batch(samples, rng)

    task = Draws()
    with pytest.raises(Exception, match="drew from a global random generator"):
        trial(task, task.data(None).train, Order(samples=70, seed=1)).speed()


def test_who_goes_on_as_another_is_not_refused_for_what_others_draw() -> None:
    """Whoever else computes in this process seeds that generator, and `speed` has looked before."""

    class Beside(NetTask):
        def batch(self, samples: Any, rng: Any) -> Any:
            np.random.rand()
            return super().batch(samples, rng)

    task = Beside(dropout=0.0, branch=False)
    trial(task, task.data(None).train, Order(samples=70, seed=1), fuse=8).warm_up(0.0, 0.1)


POLL_S = 30.0


@dataclass
class Built(Task):
    """Regression of sums; each part is what a test gives in its place."""

    net: Any = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    by: Any = lambda model: AdamW(model.parameters(), lr=0.01)
    schedule: Any = lambda optimizer: None
    samples: int = 64
    splits: Any = lambda train: Splits(train=train, held_out=train)
    measure: Any = None

    def model(self) -> Any:
        return self.net()

    def data(self, path: str | None) -> Splits:
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        made: Splits = self.splits(TensorDataset(x, x.sum(1, keepdim=True)))
        return made

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> Any:
        return self.by(model)

    def scheduler(self, optimizer: Any, steps: int) -> Any:
        return self.schedule(optimizer)

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Any:
        if self.measure is None:
            return super().metrics(model, batch, samples)
        return self.measure(model, batch, samples)


def began(task: Task, folder: Path, **asked: Any) -> list[Event]:
    """What a member says until it is ready, or cannot be."""
    settings = {"steps": 12, "micro_batch": 4, "sync": {}, "clip_norm": None} | asked
    config = MemberConfig(
        member=0,
        node="",
        address="",
        job=job(task=Task, **settings),
        task=lambda: task,  # type: ignore[arg-type]
        checkpoints=str(folder),
    )
    member, found = Member(config), []
    while not any(isinstance(event, MemberReady | MemberFailed) for event in found):
        events = member.poll(POLL_S)
        assert events, "it neither became ready nor failed"
        found += events
    return found


def refused(task: Task, folder: Path, **asked: Any) -> str:
    """Why it cannot begin, and the remedy."""
    last = began(task, folder, **asked)[-1]
    assert isinstance(last, MemberFailed), last
    assert last.error in {"TaskError", "DataError", "JobError"}, last.message
    return f"{last.message}\nhint: {last.hint}"


def two_optimizers(model: Any) -> Any:
    return [SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)]


def lightning(model: Any) -> Any:
    one = SGD(model.parameters(), lr=0.1)
    return [one], [torch.optim.lr_scheduler.StepLR(one, 3)]


class Asking(SGD):
    """As one that looks at the loss from another place."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (two_optimizers, "Task.optimizer returned list"),
        (lightning, "Task.optimizer returned tuple"),
        (lambda model: None, "Task.optimizer returned None"),
        (lambda model: AdamW, "Task.optimizer returned the class AdamW"),
        (lambda model: {"optimizer": SGD(model.parameters(), lr=0.1)}, "returned dict"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS, whose step() needs 'clos"),
        (lambda model: Asking(model.parameters(), lr=0.1), "Asking, whose step() needs 'closure'"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), "returned SparseAdam"),
    ],
    ids=["two", "lightning", "none", "class", "dict", "lbfgs", "closure", "sparse"],
)
def test_what_is_not_one_optimizer_of_gradients(by: Any, says: str, tmp_path: Path) -> None:
    found = refused(Built(by=by), tmp_path)
    assert says in found
    assert "hint: return " in found


class Timed(torch.optim.lr_scheduler.LRScheduler):
    """As those that are stepped with the number of the epoch."""

    def get_lr(self) -> Any:
        return self.base_lrs

    def _initial_step(self) -> None:
        self.base_lrs = [0.1]

    def step(self, epoch: int) -> None:  # type: ignore[override]
        raise AssertionError(epoch)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (lambda o: [torch.optim.lr_scheduler.StepLR(o, 3)], "Task.scheduler returned list"),
        (lambda o: torch.optim.lr_scheduler.StepLR, "returned the class StepLR"),
        (lambda o: lambda step: 0.1, "Task.scheduler returned function"),
        (lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 3)}, "returned dict"),
        (Timed, "Timed, whose step() needs 'epoch'"),
    ],
    ids=["list", "class", "function", "dict", "argument"],
)
def test_what_is_not_one_schedule(schedule: Any, says: str, tmp_path: Path) -> None:
    found = refused(Built(schedule=schedule), tmp_path)
    assert says in found
    assert "hint: return " in found


@pytest.mark.parametrize(
    ("net", "says", "remedy"),
    [
        (lambda: None, "Task.model returned None", "torch.nn.Module"),
        (lambda: nn.Linear, "returned the class Linear", "torch.nn.Module"),
        (lambda: nn.Sequential(nn.LazyLinear(1)), "'0.weight' of the model has no", "one batch"),
        (
            lambda: nn.Sequential(nn.Linear(4, 1), nn.LazyBatchNorm1d(affine=False)),
            "'1.running_mean' of the model has no shape yet",
            "one batch",
        ),
    ],
    ids=["none", "class", "lazy", "lazy buffer"],
)
def test_what_is_no_model_yet(net: Any, says: str, remedy: str, tmp_path: Path) -> None:
    found = refused(Built(net=net), tmp_path)
    assert says in found
    assert remedy in found


def test_a_lazy_model_that_has_seen_a_batch_begins(tmp_path: Path) -> None:
    def net() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
        model(torch.zeros(1, 4))
        return model

    assert isinstance(began(Built(net=net), tmp_path)[-1], MemberReady)


class Endless(IterableDataset[Any]):
    """Has a length, and cannot be indexed all the same."""

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize(
    ("wrap", "says", "remedy"),
    [
        (lambda data: DataLoader(data, batch_size=4), "returned a DataLoader of ", "its data set"),
        (lambda data: Endless(), "cannot be indexed: Endless", "map-style"),
        (iter, "cannot be indexed: iterator", "map-style"),
    ],
    ids=["loader", "iterable", "iterator"],
)
def test_what_cannot_be_indexed(
    split: str, wrap: Any, says: str, remedy: str, tmp_path: Path
) -> None:
    task = Built(splits=lambda train: Splits(**{"train": train, split: wrap(train)}))
    found = refused(task, tmp_path)
    assert says in found
    assert {"train": "training", "held_out": "held-out"}[split] in found
    assert remedy in found


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_a_last_micro_batch_of_one_sample_that_the_model_cannot_take(tmp_path: Path) -> None:
    found = refused(Built(net=normed, samples=65), tmp_path)
    assert "the last micro-batch of an epoch has 1 sample (of 65, micro_batch is 4)" in found
    assert "Expected more than 1 value per channel" in found
    assert "drop_last: true" in found


@pytest.mark.parametrize(
    ("samples", "asked"),
    [
        (66, {}),
        (65, {"drop_last": True}),
        (65, {"steps": 4}),  # which do not come there
        (65, {"micro_batch": 8, "global_batch": 24, "errors": {"on_error": "skip"}}),
    ],
    ids=["two", "left out", "not reached", "skipped"],
)
def test_one_that_does_not_come_or_may_be_skipped(
    samples: int, asked: dict[str, Any], tmp_path: Path
) -> None:
    assert isinstance(began(Built(net=normed, samples=samples), tmp_path, **asked)[-1], MemberReady)


def fails_at(call: int) -> Any:
    """Metrics that raise from that call on, counted from 0."""
    calls: list[int] = []

    def measure(model: Any, batch: Any, samples: int) -> Any:
        calls.append(samples)
        if len(calls) > call:
            raise ZeroDivisionError("the seventh batch")
        return {"acc": 0.5}

    return measure


@pytest.mark.parametrize(
    ("measure", "says"),
    [
        (lambda *_: 1 / 0, "measuring the held-out samples raised ZeroDivisionError"),
        (lambda *_: {"acc": None}, "Task.metrics gave 'acc' as NoneType"),
    ],
    ids=["raises", "none"],
)
def test_metrics_are_tried_before_the_first_step(measure: Any, says: str, tmp_path: Path) -> None:
    assert says in refused(Built(measure=measure), tmp_path)


def test_the_part_of_the_last_checkpoint_is_told_before_the_failure_that_follows(
    tmp_path: Path,
) -> None:
    task = Built(measure=fails_at(1))  # which is the trial
    asked = job(task=Task, steps=5, micro_batch=4, sync={}, clip_norm=None, evaluate={"batch": 64})
    member = Fellows(tmp_path, asked, 1, joining=0, task=lambda: task)  # type: ignore[arg-type]
    member.form(Form(generation=0, members=(0,), shares=(4,), step=0))
    with pytest.raises(AssertionError, match="the seventh batch"):
        member.until(MemberDone, [0])
    kinds = [type(event) for event in member.events]
    assert kinds.index(PartWritten) < kinds.index(MemberFailed)
    [part] = member.of(PartWritten)
    assert part.step == 5


# ---- the largest pass that memory holds

MB = 2**20


class Large(NetTask):
    """Each sample takes four megabytes while it is computed; it notes how many are at once."""

    def __init__(self, **given: Any) -> None:
        super().__init__(dropout=0.0, branch=False, **given)
        self.most = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.most = max(self.most, len(batch[1]))
        wide = super().loss(model, batch) * torch.ones(len(batch[1]), MB)  # kept for backward
        return (wide * wide).sqrt().mean()


@pytest.mark.parametrize("held", [2.2, 1.4])
def test_no_pass_is_larger_than_memory_holds(held: float, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"bytes": 10_000 * MB}
    monkeypatch.setattr(calibration, "pass_room_bytes", lambda *_: room["bytes"])
    task = Large()
    told: list[str] = []
    each = []
    for _ in range(3):  # the first ones also take what stays
        made = trial(task, task.data(None).train, Order(samples=64, seed=1))
        made.find_memory()
        assert made.memory is not None
        each.append(made.memory.micro_batch_bytes)
    room["bytes"], task.most = int(held * min(each)), 0
    made = trial(task, task.data(None).train, Order(samples=64, seed=1))
    made._replica.notice = lambda what, _: told.append(what)
    made.compare()
    made.find_memory()
    assert 1 <= made.largest <= 3  # of a share of four; the system's pages are no exact measure
    made.end()
    made.speed()
    assert task.most <= 2 * made.largest  # and none larger was computed to find it
    assert made.passes()["pass_samples"] == 2 * made.largest
    assert f"memory holds passes of at most {made.largest} micro-batches" in told[-1]


def test_what_a_sample_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "pass_room_bytes", lambda *_: 600 * MB)
    task = Large()
    made = trial(task, task.data(None).train, Order(samples=64, seed=1), fuse=8)
    made.compare()
    made.find_memory(thorough=True)
    passes = made.passes()
    # Of its four megabytes autograd keeps three tensors, and makes others on the way back.
    assert 12 * MB < passes["sample_bytes"] < 32 * MB
    assert 8 < passes["pass_tried"] <= passes["pass_samples"]  # more than a step has
    assert passes["pass_samples"] * passes["sample_bytes"] < 780 * MB  # pages: see above
    assert task.most == passes["pass_tried"]


def test_a_resumed_run_has_passes_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "pass_room_bytes", lambda *_: 0)
    task = Large()
    made = trial(task, task.data(None).train, Order(samples=64, seed=1))
    made.find_memory()
    made.end()
    size = made._replica.forward.size
    assert size.now == 1
    size.resume(4)
    assert size.now == 4
