"""Jobs on data of their own: two members train what a plain loop in one process does.

In float64, with augmentation, dropout and batch statistics as the jobs have them.
"""

from __future__ import annotations

import pydoc
from pathlib import Path

import pytest

from raycloud import load_job
from raycloud.on_ray.tasks import resolve
from tests.blocks import provided
from tests.jobs import JOBS, weights_file
from tests.lockstep import Fleet, difference, plain_loop
from tests.tiers import variants

IMAGES = ("settings.size=16", "settings.made_up=96")
BERT = ("settings.width=32", "settings.depth=2", "settings.length=32", "settings.made_up=96")
GPT = ("settings.length=16", f"data.path={pydoc.__file__}")


def check(name: str, folder: Path, *overrides: str, steps: int = 50) -> None:
    """Held against `plain_loop`: 8 samples a step, two in a micro-batch, shares of 3 and 1."""
    whole = ("global_batch=8", "micro_batch=2", *overrides)
    job = load_job(JOBS / f"{name}.yaml", overrides=whole)
    task = resolve(job)(**job.settings)
    single = task.model
    task.model = lambda: single().double()
    samples, order = provided(job, task, folder)
    fleet = Fleet(job, task, (3, 1), samples=samples, order=order)
    for step in range(steps):
        fleet.step(step)
    start, alone = (plain_loop(job, task, n, samples=samples, order=order) for n in (0, steps))
    assert difference(start, alone) > 1e-3
    for replica in fleet.replicas:
        assert difference(replica.model, alone) <= 1e-9


@pytest.mark.parametrize(("depth", "steps"), variants((18, 50), (50, 20)))
@pytest.mark.timeout(180)
def test_resnet(depth: int, steps: int, tmp_path: Path) -> None:
    check("resnet", tmp_path, *IMAGES, f"settings.depth={depth}", "settings.width=4", steps=steps)


def test_bert_from_scratch(tmp_path: Path) -> None:
    check("bert", tmp_path, *BERT)


@pytest.mark.full(only="many steps from the weights of a file")
def test_bert_from_weights(tmp_path: Path) -> None:
    file = weights_file(tmp_path, length=32)
    check("bert", tmp_path, *BERT, f"settings.weights={file}", "settings.heads=2")


def test_multimodal(tmp_path: Path) -> None:
    check("multimodal", tmp_path, *BERT, "settings.size=16", "settings.image_width=4")


@pytest.mark.parametrize(("width", "steps"), variants((96, 50), (192, 20), (384, 20), (768, 20)))
@pytest.mark.timeout(180)
def test_gpt(width: int, steps: int, tmp_path: Path) -> None:
    depth = 2 if width < 384 else 1
    check("gpt", tmp_path, *GPT, f"settings.width={width}", f"settings.depth={depth}", steps=steps)
