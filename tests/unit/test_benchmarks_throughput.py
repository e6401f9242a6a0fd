"""The throughput benchmark, without running a contestant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import throughput, workload
from benchmarks.contestants import CONTESTANTS, Attempt, raycloud_job
from benchmarks.marks import Marker, WorkerMarks, measure, read_marks
from benchmarks.processes import CommandFailedError, run
from raycloud.order import Order, Position, Steps
from raycloud.spec import Job


def marks(*, late_s: float = 0.0) -> WorkerMarks:
    """Five steps of 2 s and 1.5 CPU seconds each, 1.2 of them computing, losses 5 to 1."""
    return WorkerMarks(
        wall_s=tuple(100.0 + 2 * k + late_s for k in range(5)),
        cpu_s=tuple(10.0 + 1.5 * k for k in range(5)),
        computing_s=tuple(3.0 + 1.2 * k for k in range(5)),
        loss=(5.0, 4.0, 3.0, 2.0, 1.0),
    )


def test_measure_leaves_the_warm_up_out() -> None:
    found = measure([marks(), marks(late_s=0.5)], began_s=90.0, warm_up=2, global_batch=8)
    assert (found.steps, found.samples, found.wall_s) == (3, 24, 6.0)
    assert found.samples_per_s == found.typical_samples_per_s == 4.0
    assert found.cpu_s_per_sample == 2 * 3 * 1.5 / 24
    assert found.cpu_over_computing == pytest.approx(1.25)
    assert found.first_step_s == 10.5
    assert found.final_loss == 3.0


def test_measure_of_an_even_window_takes_the_middle_of_the_median_steps() -> None:
    cpu_s, loss = (0.0, 1.0, 2.0), (1.0, 1.0, 1.0)
    one = WorkerMarks(wall_s=(0.0, 1.0, 4.0), cpu_s=cpu_s, computing_s=cpu_s, loss=loss)
    found = measure([one], began_s=0.0, warm_up=1, global_batch=4)
    assert found.typical_samples_per_s == 2.0


@pytest.mark.parametrize("warm_up", [0, 5])
def test_measure_needs_a_window(warm_up: int) -> None:
    with pytest.raises(ValueError, match="warm-up"):
        measure([marks()], began_s=0.0, warm_up=warm_up, global_batch=8)


def test_measure_needs_workers_in_step() -> None:
    short = WorkerMarks(wall_s=(1.0,), cpu_s=(1.0,), computing_s=(1.0,), loss=(1.0,))
    with pytest.raises(ValueError, match="marks of"):
        measure([marks(), short], began_s=0.0, warm_up=1, global_batch=8)


def test_marker_writes_once_all_steps_are_done(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    marker = Marker(tmp_path, 3)
    marker.attach(optimizer)
    for k in range(3):
        assert read_marks(tmp_path) == ()
        marker.saw(torch.tensor(99.0))  # a trial that no step follows
        marker.saw(torch.tensor(float(k)))
        optimizer.step()
    (found,) = read_marks(tmp_path)
    assert found.loss == (0.0, 1.0, 2.0)
    assert list(found.wall_s) == sorted(found.wall_s)
    assert list(found.cpu_s) == sorted(found.cpu_s)


def test_everyone_trains_on_the_canonical_sequence() -> None:
    text = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    length, samples = workload.LENGTH, (len(text) - 1) // workload.LENGTH
    order = Order(samples=samples, seed=workload.SEED)
    cut = Steps(
        samples=samples, global_batch=workload.GLOBAL_BATCH, micro_batch=workload.PER_WORKER
    )
    batches = [workload.Batches(text, rank=r, steps=3) for r in range(workload.WORKERS)]
    for step, span in zip(range(3), cut.walk(0, Position()), strict=False):
        for rank, micro_batch in enumerate(span.micro_batches):
            ids = order.ids(0, micro_batch.start, micro_batch.stop)
            expected = np.stack([text[i * length : (i + 1) * length + 1] for i in ids])
            assert np.array_equal(batches[rank][step].numpy(), expected)


def test_the_model_is_the_same_wherever_it_is_built() -> None:
    torch.rand(3)
    before = torch.random.get_rng_state()
    first, second = workload.build_model(), workload.build_model()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert 1.8e6 < sum(p.numel() for p in first.parameters()) < 2.0e6
    with torch.device("meta"):
        assert workload.build_model().head.weight.is_meta


def test_raycloud_accepts_the_job(tmp_path: Path) -> None:
    job = Job(**raycloud_job(Attempt(directory=tmp_path, steps=7)))
    assert (job.steps, job.global_batch, job.micro_batches) == (7, 32, 2)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_commands_and_environments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    attempt = Attempt(directory=tmp_path, steps=7)
    assert CONTESTANTS[name].command(attempt)
    environment = CONTESTANTS[name].environment(attempt)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "RAY_ADDRESS" not in environment
    assert Path(environment["RAY_TMPDIR"]).is_dir()


def row(name: str, repeat: int, **values: float) -> dict[str, Any]:
    known = {
        "samples_per_s": 100.0,
        "typical_samples_per_s": 100.0,
        "cpu_s_per_sample": 0.02,
        "first_step_s": 10.0,
        "final_loss": 2.0,
    }
    return {"contestant": name, "repeat": repeat, **known, **values}


def test_turns_go_round() -> None:
    assert list(throughput.turns(("a", "b", "c"), 4)) == [
        (repeat, name)
        for repeat, order in enumerate(("abc", "bca", "cab", "abc"))
        for name in order
    ]


def test_compare_pairs_by_repeat() -> None:
    rows = [
        row("raycloud", 0, samples_per_s=95.0, first_step_s=5.0),
        row("raycloud", 1, samples_per_s=47.0, first_step_s=5.0),
        row("torchrun", 1, samples_per_s=50.0),
        row("torchrun", 0),
        row("ray-train", 0),
        row("ray-train", 2),
    ]
    found = {(one["quantity"], one["peer"]): one for one in throughput.compare(rows)}
    speed = found["samples_per_s", "torchrun"]
    assert speed["count"] == 2
    assert speed["mean"] == pytest.approx((0.95 * 0.94) ** 0.5)
    assert not speed["held"]
    assert found["cpu_s_per_sample", "torchrun"]["held_by_interval"]
    start = found["first_step_s", "ray-train"]
    assert (start["count"], start["mean"], start["held"]) == (1, 0.5, True)
    assert not start["held_by_interval"]  # a single pair has none


def test_table_shows_rows_and_ratios() -> None:
    rows = [row("raycloud", 0), row("torchrun", 0)]
    text = throughput.table(rows, throughput.compare(rows))
    assert "samples_per_s     / torchrun    1.000" in text
    assert "floor >= 0.96: held" in text
    assert "raycloud" not in throughput.table([row("torchrun", 0)], [])


def test_quick_and_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = throughput._parse(["--json", str(tmp_path / "x"), "--quick"])
    assert asked.repeats == 1
    assert asked.warm_up < asked.steps
    for wrong in (["--contestants", "horovod"], ["--steps", "5"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            throughput._parse(["--json", "x", *wrong])
    assert "horovod" in capsys.readouterr().err


def test_a_failing_contestant_ends_the_benchmark_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(name: str, repeat: int, **_: object) -> dict[str, Any]:
        if name == "torchrun":
            raise CommandFailedError("torchrun: out of luck")
        return row(name, repeat)

    monkeypatch.setattr(throughput, "measure_one", one)
    monkeypatch.setattr(throughput, "warm_caches", lambda: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    file = tmp_path / "out.json"
    assert throughput.main(["--json", str(file), "--contestants", "raycloud,torchrun"]) == 1
    record = json.loads(file.read_text())
    assert not record["complete"]
    assert [r["contestant"] for r in record["rows"]] == ["raycloud"]
    assert record["workload"]["parameters"] == 1900416
    assert "out of luck" in capsys.readouterr().err


def test_run_ends_whatever_a_command_left(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(left.pid)\n"
    )
    log = tmp_path / "log"
    run([sys.executable, "-c", code], environment=dict(os.environ), log=log, limit_s=30)
    stat = Path(f"/proc/{log.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_run_ends_a_command_that_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(CommandFailedError, match="took longer"):
        run(["sleep", "600"], environment=dict(os.environ), log=tmp_path / "log", limit_s=0.1)


def test_run_shows_what_a_failing_command_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no luck')"]
    with pytest.raises(CommandFailedError, match=r"(?s)status 1.*no luck"):
        run(command, environment=dict(os.environ), log=tmp_path / "log", limit_s=30)
