"""What `train --try` found out, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycloud.report.figures import byte_count, duration, figure

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A job that went through every room once; nothing of it is left.

    Attributes:
        job: Its name.
        status: `finished`, or `stopped` where someone asked it to end early.
        steps: Steps that were committed.
        workers: Members that computed them.
        samples: Samples that they took.
        first_step_s: From the command to the first committed step; None: there was none.
        step_s: Of the last step, from commit to commit; None: it was not measured.
        measures: Of the held-out samples; empty where the task holds none out.
        checkpoint_bytes: State that was written and read back.
        checkpoint_place: Where that was.
        wall_s: From the command to the end.
    """

    job: str
    status: str
    steps: int
    workers: int
    samples: int
    first_step_s: float | None
    step_s: float | None
    measures: Mapping[str, float] = field(default_factory=dict)
    checkpoint_bytes: int
    checkpoint_place: str
    wall_s: float


def tried_text(tried: Tried, command: str) -> str:
    """Several lines; `command` is what trains the job in earnest."""
    if tried.status != "finished":
        return f"{tried.job} was stopped while it was tried; nothing was kept"
    steps = f"{tried.steps} step{'s' if tried.steps != 1 else ''}"
    workers = f"{tried.workers} worker{'s' if tried.workers != 1 else ''}"
    lines = [f"{tried.job} works: {steps}, {tried.samples} samples, {workers}"]
    if tried.first_step_s is not None:
        after = f", the last step took {duration(tried.step_s)}" if tried.step_s else ""
        lines.append(f"  first step   {duration(tried.first_step_s)} after the command{after}")
    measures = " · ".join(f"{name} {figure(value)}" for name, value in tried.measures.items())
    lines.append(f"  held out     {measures or 'nothing: the task holds no samples out'}")
    size = byte_count(tried.checkpoint_bytes)
    lines.append(f"  checkpoint   {size} written to {tried.checkpoint_place} and read back")
    lines.append(f"  in all       {duration(tried.wall_s)}; nothing was kept")
    return "\n".join([*lines, "", f"train it: {command}"])
