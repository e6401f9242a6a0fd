"""The ports of the pages, trained: as good as what the programs they come from come to."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import raycloud
from raycloud import Run
from tests.live import exact_steps, parameters
from tests.pages import DOCS, program

CPUS = 4
PORTS = DOCS / "ports"
EPOCHS = {"text": 1}  # of the others: as their job says

pytestmark = [pytest.mark.usefixtures("cluster", "alone"), pytest.mark.timeout(200)]


@pytest.fixture
def alone() -> Iterator[None]:
    """Every port names its file `task.py`: none may be taken for another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield
        for module in {"task", "raycloud_task_task"} & set(sys.modules):
            del sys.modules[module]


def trained(name: str, folder: Path) -> Run:
    epochs = [f"epochs={EPOCHS[name]}"] if name in EPOCHS else []
    job = raycloud.load_job(PORTS / name / "job.yaml", overrides=epochs)
    run = raycloud.train(job, run_dir=folder / "run")
    assert run.status == "finished"
    assert exact_steps(run.directory) == run.summary["steps"]
    return run


@pytest.mark.full(only="the port of a plain PyTorch script")
def test_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = SimpleNamespace(**program(PORTS / "pytorch/train.py", "before"))
    run = trained("pytorch", tmp_path)
    model = before.ResNet()
    model.load_state_dict(state(run), strict=True)
    loader = torch.utils.data.DataLoader(before.Digits(train=False), 64)
    ours = before.evaluate(model, loader, torch.device("cpu"))
    arguments = {"device": "cpu", "batch_size": 32, "epochs": 6, "seed": 0}
    before.main(SimpleNamespace(**arguments, output=tmp_path / "model.pth"))
    theirs = float(re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)[-1])
    assert theirs > 0.85
    assert ours > theirs - 0.06


@pytest.mark.full(only="the port of a Hugging Face script")
def test_hugging_face_style(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = SimpleNamespace(**program(PORTS / "text/train.py", "before"))
    run = trained("text", tmp_path)
    model = before.TextForSequenceClassification(before.TextConfig())
    model.load_state_dict(state(run), strict=True)
    _, held_out = before.load_dataset()
    loader = torch.utils.data.DataLoader(held_out, 64, collate_fn=before.DataCollatorWithPadding())
    ours = before.compute_accuracy(model, loader)
    before.main(SimpleNamespace(batch_size=32, learning_rate=2e-3, num_train_epochs=1, seed=0))
    theirs = float(re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)[-1])
    assert theirs > 0.7
    assert ours > theirs - 0.06


@pytest.mark.full(only="the port of a Lightning module")
def test_lightning(tmp_path: Path) -> None:
    assert trained("lightning", tmp_path).metrics["accuracy"] > 0.8


@pytest.mark.full(only="the port of a Ray Train script")
def test_ray_train(tmp_path: Path) -> None:
    """The script itself comes to 0.8 at least; Ray Train takes most of a minute to start."""
    assert trained("ray_train", tmp_path).metrics["accuracy"] > 0.8
    program(PORTS / "ray_train/train.py", "before")


def state(run: Run) -> dict[str, torch.Tensor]:
    """The model of a run's newest checkpoint: parameters and buffers."""
    return parameters(run.directory)
