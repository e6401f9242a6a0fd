"""Event logs of runs that never were: for what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    GenerationFormed,
    MemberReady,
    MemberSpawned,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.log import Entry, entries_of, to_line
from raycloud.report.state import Tally
from raycloud.report.summary import Summary, of_run, summarize, write_summary

JOB = "name: gpt\ntask: raycloud.metrics:Mean\nglobal_batch: 8\nmicro_batch: 4\n"
STARTED_T = 1_800_000_000.0


def from_line(line: str) -> tuple[float, Event]:
    """The event of a line that holds one, with its time."""
    (entry,) = entries_of(line)
    return entry.t, entry.event


def tally_of(*told: tuple[float, Event]) -> Tally:
    """What these events come to."""
    tally = Tally()
    for t, event in told:
        tally.apply(t, event)
    return tally


def fold(
    told: Iterable[tuple[float, Event]], *, predicted: Mapping[str, Any] | None = None
) -> Summary:
    """The summary of these events."""
    return summarize(tally_of(*told), predicted=predicted)


def read_summary(path: Path) -> Summary:
    """The summary in a `summary.json`."""
    return Summary.from_record(json.loads(path.read_text()))


def formed(generation: int, *members: int, first: int = 0) -> GenerationFormed:
    """A generation with a micro-batch for each member."""
    shares = (1,) * len(members)
    return GenerationFormed(generation=generation, members=members, shares=shares, first_step=first)


def commit(
    member: int, first: int, last: int, *, loss: float = 2.0, generation: int = 0
) -> StepsCommitted:
    """Steps of 8 samples, half a second each."""
    steps = last - first
    return StepsCommitted(
        member=member,
        generation=generation,
        first_step=first,
        last_step=last,
        epoch=0,
        offset=8 * last,
        loss=loss,
        weight=8.0 * steps,
        samples=8 * steps,
        micro_batches=steps,
        grad_norm=1.0,
        learning_rate=0.1,
        wall_s=0.5 * steps,
        compute_s=0.25 * steps,
        data_s=0.05 * steps,
        exchange_s=0.1 * steps,
        cpu_s=0.3 * steps,
        bytes_sent=100 * steps,
        bytes_dense=200 * steps,
    )


def ready(member: int, *, node: str = "node-a") -> MemberReady:
    """A member of a task with 1000 samples."""
    return MemberReady(
        member=member,
        samples=1000,
        parameters=64,
        state_bytes=768,
        gradient_bytes=256,
        fixed_s=0.0,
        micro_batch_s=0.25,
        node=node,
    )


def entries(
    *, steps: int = 10, loss: float = 2.0, status: str = "finished"
) -> list[tuple[float, Event]]:
    """A run of two members; one step a report, one report a second. Without `status` it goes on."""
    t = STARTED_T
    told: list[tuple[float, Event]] = [
        (t, RunStarted(job="gpt", version="0.1.0")),
        (t + 1, MemberSpawned(member=0)),
        (t + 1, MemberSpawned(member=1)),
        (t + 3, ready(0)),
        (t + 3, ready(1, node="node-b")),
        (t + 4, GenerationFormed(generation=0, members=(0, 1), shares=(1, 1), first_step=0)),
    ]
    for step in range(steps):
        now = t + 5 + step
        told += [(now, commit(m, step, step + 1, loss=loss + 2.0 / (step + 1))) for m in (0, 1)]
    now = t + 5 + steps
    told.append((now, CheckpointPublished(step=steps, path="c", state_bytes=768, write_s=0.1)))
    told.append((now, Evaluated(step=steps, metrics={"loss": loss + 0.1})))
    if status:
        told.append((now + 1, RunFinished(status=status, steps=steps)))
    return told


def text(told: list[tuple[float, Event]]) -> str:
    """What `events.jsonl` holds of them."""
    return "".join(to_line(t, event) + "\n" for t, event in told)


def run_directory(path: Path, job: str, told: list[tuple[float, Event]]) -> Path:
    """A run's directory, with its job, log and summary."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "job.yaml").write_text(JOB + job)
    (path / "events.jsonl").write_text(text(told))
    write_summary(path / "summary.json", of_run(path))
    return path


def pairs(found: list[Entry]) -> list[tuple[float, Event]]:
    """Times and events of entries."""
    return [(entry.t, entry.event) for entry in found]
