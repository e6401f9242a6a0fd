"""The README's example is what it says: a task that keeps its contract and a job that loads."""

from __future__ import annotations

import io
import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.racing.results import OURS, Row, by_contestant, load_all
from benchmarks.racing.scenarios import SCENARIOS
from benchmarks.run import RESULTS
from raycloud.rows import Rows
from raycloud.spec import load_job
from raycloud.task import Source, Task

CODECS = {"torchrun-fp16", "torchrun-powersgd", "torchft-diloco"}  # what they exchange is not exact
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the README's files; a block's first line names its file."""
    for name, text in re.findall(
        r"^```\w+\n# (line\.\w+)\n(.*?)^```", README.read_text(), re.M | re.S
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_job_loads(example: Path) -> None:
    job = load_job(example / "line.yaml", overrides=("steps=400", "elastic.shares=equal"))
    assert (job.steps, job.elastic.shares) == (400, "equal")


def test_task_trains(example: Path) -> None:
    job = load_job(example / "line.yaml")
    names: dict[str, type[Task]] = {}
    exec(compile((example / "line.py").read_text(), "line.py", "exec"), names)
    task = names["Line"](**job.settings)
    torch.manual_seed(job.seed)
    model, splits = task.model(), task.data(job.data.path)
    assert splits.held_out is not None
    optimizer, losses = task.optimizer(model), []
    for step in range(200):
        ids = range(step * job.global_batch, (step + 1) * job.global_batch)
        samples = [splits.train[i % len(splits.train)] for i in ids]
        loss = task.loss(model, task.batch(samples, np.random.default_rng(0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_the_example_of_a_source() -> None:
    code = re.search(
        r"^```python\n(from raycloud import Source.*?)^```", README.read_text(), re.M | re.S
    )
    assert code is not None
    names: dict[str, type[Task]] = {}
    exec(compile(code[1], "photos.py", "exec"), names)
    photos, picture = names["Photos"], io.BytesIO()
    Image.new("RGB", (4, 6), (200, 0, 0)).save(picture, "JPEG")
    splits = photos.data(None, "s3://here")  # type: ignore[arg-type]
    assert isinstance(splits.train, Source)
    assert splits.train.path == "s3://here/train-*.parquet"
    rows = Rows({"image": [picture.getvalue()], "label": np.array([3])})
    kept = photos.preprocess(None, rows)  # type: ignore[arg-type]
    assert kept["image"].shape == (1, 6, 4, 3)
    assert abs(int(kept["image"][0, 0, 0, 0]) - 200) < 8


def _share(rows: list[Row]) -> str:
    found = [row["ratio_to_limit"] for row in rows if row["ratio_to_limit"] is not None]
    return f"{median(found):.3f}"


def _complete(rows: list[Row]) -> list[Row]:
    """Those of the repeats in which everybody ran: on one machine, against one limit."""
    peers = {"ray-train", "torchrun", "torchrun-powersgd", "torchft"}
    ran: dict[int, set[str]] = {}
    for row in rows:
        ran.setdefault(row["repeat"], set()).add(row["contestant"])
    return [row for row in rows if ran[row["repeat"]] >= {OURS, *peers}]


def test_its_table_of_races_is_what_the_rows_say() -> None:
    told = re.findall(
        r"^\| (S\d) [^|]*\| (\S+) \| (\S+ \S+) \| (\S+) \|$", README.read_text(), re.M
    )
    assert [name for name, *_ in told] == sorted(SCENARIOS)
    for scenario, ours, best, with_codec in told:
        every = [row for row in load_all(RESULTS) if row["scenario"] == scenario]
        rows = by_contestant(_complete(every))
        exact = {
            name: _share(theirs)
            for name, theirs in rows.items()
            if name.startswith(("ray-train", "torchrun", "torchft")) and name not in CODECS
        }
        fastest = max(exact, key=exact.__getitem__)
        assert (scenario, ours) == (scenario, _share(rows[OURS]))
        assert (scenario, best) == (scenario, f"{exact[fastest]} {fastest}")
        assert (scenario, with_codec) == (scenario, _share(rows["torchrun-powersgd"]))
