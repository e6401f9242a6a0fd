"""The README is short, its example works, and its transcript and figures are what they say."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.racing.results import OURS, Row, by_contestant, load_all
from benchmarks.racing.scenarios import SCENARIOS
from benchmarks.run import RESULTS
from raycloud.events import Evaluated, GenerationFormed, MemberLost, Recovered
from raycloud.report.notes import note
from raycloud.rows import Rows
from raycloud.spec import load_job
from raycloud.task import Source, Task
from tests.pages import DOCS, README, ROOT, blocks, table

CODECS = {"torchrun-fp16", "torchrun-powersgd", "torchft-diloco"}  # what they exchange is not exact
POWERSGD = "torchrun-powersgd"
MOST_WORDS = 900
MEASURED = DOCS / "measured.md"


def test_it_is_short() -> None:
    told, more, _ = README.read_text().rpartition("\n## More\n")
    assert more
    assert len(told.split()) <= MOST_WORDS


# --- the example ---


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the README's files: the loop, the task that it becomes, and the job."""
    for block in blocks(README):
        for name, text in block.files.items():
            (tmp_path / name).write_text(text)
    return tmp_path


def _executed(path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), path.name, "exec"), names)
    return names


def test_job_loads(example: Path) -> None:
    job = load_job(example / "line.yaml", overrides=("steps=400", "elastic.shares=equal"))
    assert (job.steps, job.elastic.shares) == (400, "equal")


def test_loop_trains(example: Path) -> None:
    names = _executed(example / "loop.py")
    assert names["loss"].item() < 1.0


def test_task_trains(example: Path) -> None:
    job = load_job(example / "line.yaml")
    assert job.steps is not None
    task: Task = _executed(example / "line.py")["Line"](**job.settings)
    torch.manual_seed(job.seed)
    model, splits = task.model(), task.data(job.data.path)
    assert not isinstance(splits.train, Source)
    optimizer, losses = task.optimizer(model), []
    for step in range(job.steps):
        ids = range(step * job.global_batch, (step + 1) * job.global_batch)
        samples = [splits.train[i % len(splits.train)] for i in ids]
        loss = task.loss(model, task.batch(samples, np.random.default_rng(0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_loop_and_task_have_the_same_data_and_model(example: Path) -> None:
    loop, task = _executed(example / "loop.py"), _executed(example / "line.py")["Line"]()
    for one, other in zip(loop["rows"]().tensors, task.data("").train.tensors, strict=True):
        assert torch.equal(one, other)
    assert str(loop["model"]) == str(task.model())
    assert loop["optimizer"].defaults == task.optimizer(task.model()).defaults


def test_the_example_of_a_source() -> None:
    (block,) = [b for b in blocks(DOCS / "concepts.md") if "class Photos" in b.text]
    names: dict[str, type[Task]] = {}
    exec(compile(block.text, block.page, "exec"), names)
    photos, picture = names["Photos"], io.BytesIO()
    Image.new("RGB", (4, 6), (200, 0, 0)).save(picture, "JPEG")
    splits = photos.data(None, "s3://here")  # type: ignore[arg-type]
    assert isinstance(splits.train, Source)
    assert splits.train.path == "s3://here/train-*.parquet"
    rows = Rows({"image": [picture.getvalue()], "label": np.array([3])})
    kept = photos.preprocess(None, rows)  # type: ignore[arg-type]
    assert kept["image"].shape == (1, 6, 4, 3)
    assert abs(int(kept["image"][0, 0, 0, 0]) - 200) < 8


# --- the transcript ---


def test_its_transcript_is_in_the_words_of_a_run() -> None:
    (block,) = [block for block in blocks(README) if block.is_transcript]
    shown = block.text.splitlines()

    def formed(generation: int, step: int, members: tuple[int, ...], *shares: int) -> str | None:
        return note(
            GenerationFormed(generation=generation, first_step=step, members=members, shares=shares)
        )

    died = "The actor died unexpectedly before finishing this task."
    said = [
        formed(0, 0, (0, 1), 4, 4),
        note(MemberLost(member=0, reason=died)),
        formed(11, 339, (1,), 8),
        note(Recovered(generation=11, lost=(0,), cause=died, detected_s=104.36, resumed_s=104.92)),
        formed(12, 356, (1, 2), 1, 7),
        note(Evaluated(step=600, metrics={"loss": 1.518})),
    ]
    assert [line for line in shown if line in said] == said


# --- figures ---


def _share(rows: list[Row]) -> str:
    found = [row["ratio_to_limit"] for row in rows if row["ratio_to_limit"] is not None]
    return f"{median(found):.3f}"


def _complete(rows: list[Row]) -> list[Row]:
    """Those of the repeats in which everybody ran: on one machine, against one limit."""
    peers = {"ray-train", "torchrun", POWERSGD, "torchft"}
    ran: dict[int, set[str]] = {}
    for row in rows:
        ran.setdefault(row["repeat"], set()).add(row["contestant"])
    return [row for row in rows if ran[row["repeat"]] >= {OURS, *peers}]


def _race(scenario: str) -> tuple[str, str, str]:
    """What raycloud, the best peer without a codec, and PowerSGD came to."""
    every = [row for row in load_all(RESULTS) if row["scenario"] == scenario]
    rows = by_contestant(_complete(every))
    exact = {
        name: _share(theirs)
        for name, theirs in rows.items()
        if name.startswith(("ray-train", "torchrun", "torchft")) and name not in CODECS
    }
    fastest = max(exact, key=exact.__getitem__)
    return _share(rows[OURS]), f"{exact[fastest]} {fastest}", _share(rows[POWERSGD])


def _in_the_readme(scenario: str) -> tuple[str, str]:
    """PowerSGD is named where it is the best of all."""
    ours, best, powersgd = _race(scenario)
    codec = f", {powersgd} PowerSGD" if powersgd > best.partition(" ")[0] else ""
    return ours, best + codec


def _by_two_runs(found: Any) -> tuple[str, str]:
    again = json.loads((RESULTS / "sync/S3-far-target.json").read_text())
    rows = [row for one in (found, again) for row in one["rows"]]

    def shares(name: str) -> str:
        return ", ".join(f"{r['ratio_to_limit']:.3f}" for r in rows if r["contestant"] == name)

    return shares("raycloud-auto"), f"{shares(POWERSGD)} PowerSGD"


def _throughput(found: Any) -> tuple[str, str]:
    asked = ("samples_per_s", "torchrun")
    other = json.loads((RESULTS / "throughput-intel.json").read_text())
    every = [c for of in (found, other) for c in of["comparisons"]]
    means = [c["mean"] for c in every if (c["quantity"], c["peer"]) == asked]
    return ", ".join(f"{mean:.3f}" for mean in means), "1 torchrun"


def _fed(name: str, peer: str) -> Callable[[Any], tuple[str, str]]:
    def told(found: Any) -> tuple[str, str]:
        (one,) = [verdict for verdict in found["verdicts"] if verdict["name"] == name]
        return f"{one['value']:.2f}", f"1 {peer}"

    return told


OTHERS: dict[str, Callable[[Any], tuple[str, str]]] = {
    "S3, `sync: auto`, two runs": _by_two_runs,
    "samples/s, two workers": _throughput,
    "JPEGs/s, first epoch": _fed(
        "cold / best peer batched by hand", "`DataLoader`, batched decoder"
    ),
    "JPEGs/s, later epochs": _fed("warm / best shuffled peer", "best that shuffles"),
}


@pytest.mark.parametrize("row", table(README, "Results"), ids=lambda row: row[0])
def test_a_figure_of_the_readme_is_what_its_file_says(row: list[str]) -> None:
    what, ours, peer, link = row
    target = re.search(r"\((\S+\.json)\)", link)
    assert target is not None
    file = ROOT / target[1]
    if what in OTHERS:
        assert (ours, peer) == OTHERS[what](json.loads(file.read_text()))
    else:
        assert file == RESULTS / f"{what[:2]}.json"
        assert (ours, peer) == _in_the_readme(what[:2])


def test_the_table_of_races_is_what_the_rows_say() -> None:
    told = re.findall(
        r"^\| \[(S\d)\]\(\S+/results/S\d.json\) [^|]*\| (\S+) \| (\S+ \S+) \| (\S+) \|$",
        MEASURED.read_text(),
        re.M,
    )
    assert [name for name, *_ in told] == sorted(SCENARIOS)
    for scenario, ours, best, with_codec in told:
        assert (scenario, (ours, best, with_codec)) == (scenario, _race(scenario))


@pytest.mark.parametrize(
    ("heading", "file", "named"),
    [
        pytest.param(
            "Nothing happens, on one machine", "throughput.json", "comparisons", id="throughput"
        ),
        pytest.param("Feeding images", "ingest.json", "verdicts", id="ingest"),
    ],
)
def test_ratios_and_intervals_are_those_of_the_file(heading: str, file: str, named: str) -> None:
    found = json.loads((RESULTS.parent / "baselines" / file).read_text())[named]
    places = 3 if named == "comparisons" else 2

    def written(one: Any, digits: int) -> str:
        value = one.get("mean", one.get("value"))
        low, high = one["low"] or 0.0, one["high"] or 0.0
        return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    known = {written(one, digits) for one in found for digits in (2, places)}
    assert {row[1] for row in table(MEASURED, heading)} <= known
