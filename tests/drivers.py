"""Commands that drive runs on a head, some of which are killed, and what they leave there."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raycloud.events import CheckpointPublished, Recovered, RunStarted, StepsCommitted
from raycloud.report.log import Tail
from raycloud.spec import Job, dump_job
from tests.heads import TOKEN, Head
from tests.live import RAYCLOUD, ROOT, Command, command, events, of_kind, processes_below

LEFT = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in sys.stdin:
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    names = ray.util.list_named_actors(all_namespaces=True)
    free = ray.available_resources().get("CPU", 0.0)
    print(json.dumps([len(groups), names, free]), flush=True)
"""


@contextmanager
def driver(
    head: Head, folder: Path, run_dir: Path, job: Job | None = None, more: tuple[str, ...] = ()
) -> Iterator[Command]:
    """`raycloud train` on the head; without a job it goes on."""
    words: tuple[object, ...] = ("--resume",)
    if job is not None:
        (run_dir.parent / "job.yaml").write_text(dump_job(job))
        words = (run_dir.parent / "job.yaml",)
    where = ("--run-dir", run_dir, "--address", head.joined)
    with command(folder, RAYCLOUD, "train", *words, *where, *more, **TOKEN) as one:
        yield one


def starts(run_dir: Path) -> list[RunStarted]:
    return of_kind(RunStarted, events(run_dir))


def step(one: Command, run_dir: Path) -> int:
    """The newest step that a worker has reported."""
    assert not one.ended(), one.err
    return max((e.last_step for e in of_kind(StepsCommitted, events(run_dir))), default=0)


def saved(one: Command, run_dir: Path) -> bool:
    assert not one.ended(), one.err
    return bool(of_kind(CheckpointPublished, events(run_dir)))


def went_on(one: Command, run_dir: Path) -> bool:
    assert not one.ended(), one.err
    return bool(of_kind(Recovered, events(run_dir)))


def joined(one: Command, run_dir: Path) -> bool:
    """Whether a worker that was not there at the start has computed."""
    assert not one.ended(), one.err
    return any(e.member > 1 for e in of_kind(StepsCommitted, events(run_dir)))


def check_words(run_dir: Path) -> None:
    """Every word of every worker is in the log, once, and in its order."""
    told: dict[int, list[int]] = {}
    for _, _, word in Tail(run_dir / "events.jsonl").rest():
        if word is not None:
            told.setdefault(word[0], []).append(word[1])
    assert told
    for numbers in told.values():
        assert numbers == list(range(1, len(numbers) + 1))


class Left:
    """Reservations, named actors and free CPUs of a head's cluster, asked for by one process.

    Attributes:
        process: Which has joined the cluster, and answers each line that it is sent.
    """

    def __init__(self, head: Head) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEFT, head.joined],
            env=os.environ | TOKEN | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> tuple[int, list[Any], float]:
        """What is there now."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = next(line for line in self.process.stdout if line.startswith("["))
        groups, names, cpus = json.loads(told)
        return groups, names, cpus

    def close(self) -> None:
        """Let the process leave the cluster."""
        self.process.communicate()


def actors(head: Head) -> dict[int, str]:
    """The processes of a run, by id."""
    lines = processes_below(head.folder)
    names = ("ray::PoolActor", "ray::PipelineActor", "ray::CollatorActor", "ray::MemberActor")
    return {pid: line.split(".")[0] for pid, line in lines.items() if line.startswith(names)}


def pools(head: Head) -> list[int]:
    lines = processes_below(head.folder)
    return [pid for pid, line in lines.items() if line.startswith("ray::PoolActor")]


def tell(what: str, seconds: float) -> None:
    """What was measured, for whoever reads the test's output."""
    logging.getLogger(__name__).info("%s: %.1f", what, seconds)
