"""What cannot be trained is refused before the first step, and what would do is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raycloud.commands import Form
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady, PartWritten
from raycloud.task import Splits, Task
from raycloud.worker.member import Member, MemberConfig
from tests.fellows import Fellows
from tests.lockstep import job

POLL_S = 30.0


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here it shares a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
