"""How each contestant is started: one command, a fresh process tree, the same environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT
from benchmarks.workload import CLIP_NORM, GLOBAL_BATCH, PER_WORKER, SEED, WORKERS
from raycloud.events import StepsCommitted
from raycloud.report.log import read_events

# Of the caller's shell only this is passed on; nothing that tunes torch, Ray or the allocator.
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TZ", "USER")
# A user who cares for speed sets these too; raycloud sets its own.
_RAY_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run of one contestant: all of it below one directory that is deleted afterwards."""

    directory: Path
    steps: int

    @property
    def marks(self) -> Path:
        """Where its workers' marks go."""
        return self.directory / "marks"

    @property
    def run_directory(self) -> Path:
        """Where raycloud keeps its run."""
        return self.directory / "run"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to train the workload.

    Attributes:
        command: The command line of an attempt; writes the files it needs.
        variables: Environment variables of its own.
        reported: What it says of itself, for comparison with what was measured.
    """

    command: Callable[[Attempt], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    reported: Callable[[Attempt], dict[str, Any]] = lambda _: {}

    def environment(self, attempt: Attempt) -> dict[str, str]:
        """All of an attempt's environment."""
        temporary = attempt.directory / "t"  # short: the path of a socket has at most 107 bytes
        temporary.mkdir(exist_ok=True)
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "MKL_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(temporary),
            "TMPDIR": str(temporary),
            **self.variables,
        }


def _torchrun(attempt: Attempt) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(WORKERS)),
        *("-m", "benchmarks.peers.torchrun_ddp"),
        *("--steps", str(attempt.steps), "--marks", str(attempt.marks)),
    ]


def _ray_train(attempt: Attempt) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.peers.ray_train"),
        *("--steps", str(attempt.steps), "--marks", str(attempt.marks)),
        *("--storage", str(attempt.directory / "storage")),
    ]


def _raycloud(attempt: Attempt) -> list[str]:
    return raycloud_command(attempt, raycloud_job(attempt))


def raycloud_command(attempt: Attempt, values: Mapping[str, Any]) -> list[str]:
    """The command line of `raycloud train` with these values as its job file, which is written."""
    job = attempt.directory / "job.yaml"
    job.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    program = Path(sys.executable).with_name("raycloud")
    return [str(program), "train", str(job), "--run-dir", str(attempt.run_directory), "--plain"]


def raycloud_job(attempt: Attempt) -> dict[str, Any]:
    """The workload as a job file; all that is not named stays as raycloud sets it."""
    return {
        "format": 1,
        "name": "throughput",
        "task": "benchmarks.raycloud_task:Throughput",
        "settings": {"marks": str(attempt.marks), "steps": attempt.steps},
        "steps": attempt.steps,
        "seed": SEED,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": PER_WORKER,
        "clip_norm": CLIP_NORM,
        "elastic": {"min_workers": WORKERS, "max_workers": WORKERS, "shares": "equal"},
    }


def _raycloud_reported(attempt: Attempt) -> dict[str, Any]:
    summary = json.loads((attempt.run_directory / "summary.json").read_text())
    names = ("samples_per_s", "first_step_s", "final_loss", "train_s", "bytes_sent", "recoveries")
    log = read_events(attempt.run_directory / "events.jsonl")
    steps = [event for _, event in log if isinstance(event, StepsCommitted)]
    return {
        **{name: summary.get(name) for name in names},
        "worker_cpu_s": sum(event.cpu_s for event in steps),
        "exchange_s": sum(event.exchange_s for event in steps),
        "data_s": sum(event.data_s for event in steps),
    }


CONTESTANTS: Mapping[str, Contestant] = {
    "raycloud": Contestant(command=_raycloud, reported=_raycloud_reported),
    "torchrun": Contestant(command=_torchrun),
    "ray-train": Contestant(command=_ray_train, variables=_RAY_QUIET),
}
