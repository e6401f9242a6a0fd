"""The ports of the pages: how many lines they take, and that before and after are one model."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from raycloud import Task, load_job
from raycloud.on_ray.tasks import resolve
from tests.pages import DOCS, program, table

PORTS = DOCS / "ports"
NAMES = ("pytorch", "text", "lightning", "ray_train")
MOST = 15


def changed(name: str) -> tuple[int, int]:
    """Lines written and lines no longer needed, blank ones left out."""
    before, after = ((PORTS / name / f).read_text().splitlines() for f in ("train.py", "task.py"))
    marks = [
        line[0]
        for line in difflib.unified_diff(before, after, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in {"+++", "---"} and line[1:].strip()
    ]
    return marks.count("+"), marks.count("-")


def ported(name: str) -> Task:
    job = load_job(PORTS / name / "job.yaml")
    return resolve(job)(**job.settings)


@pytest.fixture(autouse=True)
def no_task_is_kept() -> Iterator[None]:
    """Every port names its file `task.py`: none may be taken for another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "task", raising=False)
        patch.setattr(sys, "path", list(sys.path))
        yield
        for module in [m for m in sys.modules if m in {"task", "raycloud_task_task"}]:
            del sys.modules[module]


def test_every_port_has_a_page() -> None:
    assert {path.name for path in PORTS.iterdir() if path.is_dir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_port_takes_few_lines_and_the_pages_say_how_many(name: str) -> None:
    written, gone = changed(name)
    assert 0 < written <= MOST
    page = f"port-{name.replace('_', '-')}.md"
    text = " ".join((DOCS / page).read_text().split())
    assert f"{written} lines are written, {gone} are no longer needed." in text
    (row,) = [row for row in table(DOCS / "port.md", "Bring your own model") if page in row[3]]
    assert row[1:3] == [str(written), str(gone)]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_takes_few_lines(name: str) -> None:
    assert len((PORTS / name / "job.yaml").read_text().splitlines()) in (7, 8)


@pytest.mark.parametrize("name", NAMES)
def test_a_port_learns(name: str) -> None:
    task = ported(name)
    torch.manual_seed(0)
    model, splits = task.model(), task.data(None)
    assert splits.held_out is not None
    optimizer, losses = task.optimizer(model), []
    schedule = task.scheduler(optimizer, 60)
    for step in range(40):
        samples = [splits.train[i] for i in range(32 * step, 32 * step + 32)]
        loss = task.loss(model, task.batch(samples, np.random.default_rng(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5])
    with torch.no_grad():
        measured = task.metrics(model.eval(), task.batch([splits.held_out[0]], None), 1)
    assert all(np.isfinite(metric.value()) for metric in measured.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_can_be_made_without_memory(name: str) -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in ported(name).model().parameters())


def test_the_plain_port_augments_by_place_alone() -> None:
    task = ported("pytorch")
    samples = [task.data(None).train[i] for i in range(16)]
    first, again, other = (task.batch(samples, np.random.default_rng(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    held_out = task.batch(samples, None)[0]
    assert torch.equal(held_out, torch.stack([image for image, _ in samples]))


# --- Lightning's program, where Lightning is not installed ---


class Module(nn.Module):
    """As much of a LightningModule as the program uses."""

    def log(self, name: str, value: torch.Tensor) -> None:
        logged.setdefault(name, []).append(value.item())


class Trainer:
    """The documented order of calls of a `fit`: steps, then validation, each epoch."""

    def __init__(self, *, max_epochs: int, accelerator: str, devices: int) -> None:
        self.epochs = max_epochs

    def fit(self, module: Module, loader: list[object], validation: list[object]) -> None:
        optimizer = module.configure_optimizers()
        for _ in range(self.epochs):
            logged.pop("accuracy", None)
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                module.training_step(batch, i).backward()
                optimizer.step()
            for i, batch in enumerate(validation):
                module.validation_step(batch, i)
        self.callback_metrics = {"accuracy": float(np.mean(logged["accuracy"]))}


logged: dict[str, list[float]] = {}


def test_the_lightning_program_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("lightning") is None:
        stand_in = ModuleType("lightning")
        parts = {
            "LightningModule": Module,
            "Trainer": Trainer,
            "seed_everything": torch.manual_seed,
        }
        vars(stand_in).update(parts)
        monkeypatch.setitem(sys.modules, "lightning", stand_in)
    names = SimpleNamespace(**program(PORTS / "lightning/train.py", "__main__"))
    assert names.LitDigits().lr == 1e-3
    (accuracy,) = re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)
    assert float(accuracy) > 0.8
