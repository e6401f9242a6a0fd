"""Summary of a run for people: plain lines, in colour, HTML; so are a plan and a trial."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.report.comparison import earlier
from raycloud.report.figures import (
    byte_count,
    counted,
    duration,
    figure,
    percent,
    printable,
    printable_line,
    sparkline,
    table,
)
from raycloud.report.notes import metrics_text
from raycloud.report.predictions import Compared
from raycloud.report.recoveries import NAMES, counts_text, text_of
from raycloud.report.usage import usage_text

if TYPE_CHECKING:
    from rich.console import Group

    from raycloud.planner.plan import Plan
    from raycloud.report.summary import Summary

_LABELS = {
    "step_s": "seconds per step",
    "samples_per_s": "samples per second",
    "compute_s": "computing, s per step",
    "exchange_s": "exchange, s per step",
    "exposed_s": "waiting for it, s per step",
    "bytes_per_step": "bytes per step and member",
    "first_step_s": "seconds to first step",
}
_SHOWN = 32  # members of a plan
_INTERVAL = ("low_s", "high_s")  # of a predicted step
PARTS = (  # of a run's goodput, in the order in which they are told
    ("computing", ("computing_s",)),
    ("waiting", ("data_s", "exchange_s", "lane_s")),
    ("recovering", ("recovering_s",)),
    ("lost", ("lost_s",)),
    ("starting", ("starting_s",)),
    ("beside steps", ("beside_s",)),
)
_LEAST = 0.001  # of the whole: what is less is left out
_STYLES = {"finished": "green", "stopped": "yellow", "failed": "red", "unfinished": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a summary says, before it is laid out: all texts are printable."""

    title: str
    rows: list[tuple[str, str]]
    predicted: list[tuple[str, str, str, str]] = field(default_factory=list)
    sample: str = ""
    commands: list[str] = field(default_factory=list)


def page(summary: Summary, directory: Path | None = None) -> Page:
    """What a summary says; with the run's directory also where things are and what comes next."""
    commands = []
    if directory is not None:
        name = shlex.quote(str(directory))
        if summary.status == "unfinished":
            commands.append(f"raycloud watch {name}")
        if summary.status != "finished" and summary.checkpoints:
            commands.append(f"raycloud train --resume --run-dir {name}")
        commands.append(f"raycloud report {name}")
        if before := earlier(directory):
            commands.append(f"raycloud compare {shlex.quote(str(before))} {name}")
        commands.append(f"tensorboard --logdir {name}")
    title = (
        f"{summary.job or 'run'} {summary.status}: {summary.steps} steps, {summary.samples} samples"
    )
    if summary.wall_s:
        title += f" in {duration(summary.wall_s)}"
    return Page(
        title=printable_line(title),
        rows=[(label, text) for label, text in _rows(summary, directory) if text],
        predicted=_predicted(summary),
        sample=printable(summary.sample or "").rstrip(),
        commands=[printable_line(command) for command in commands],
    )


def summary_text(summary: Summary, directory: Path | None = None) -> str:
    """The summary as plain lines without colour or control characters."""
    content = page(summary, directory)
    width = max((len(label) for label, _ in content.rows), default=0) + 2
    lines = [content.title, "", *(f"  {label:<{width}}{text}" for label, text in content.rows)]
    if content.predicted:
        compared = [("", "predicted", "measured", ""), *content.predicted]
        first = max(len(row[0]) for row in compared)
        lines.append("")
        for label, predicted, measured, off in compared:
            lines.append(f"  {label:<{first}}  {predicted:>12}  {measured:>12}  {off}".rstrip())
    if content.sample:
        lines += ["", "sample", *(f"  {line}".rstrip() for line in content.sample.split("\n"))]
    if content.commands:
        lines += ["", "next", *(f"  {command}" for command in content.commands)]
    return "\n".join(lines)


def summary_renderable(summary: Summary, directory: Path | None = None) -> Group:
    """The summary for a terminal, in colour."""
    from rich.console import Group  # noqa: PLC0415 - only a terminal needs it
    from rich.padding import Padding  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    content = page(summary, directory)
    rows = Table.grid(padding=(0, 2))
    for label, text in content.rows:
        rows.add_row(Text(label, style="bright_black"), Text(text))
    parts: list[Text | Padding] = [
        Text(content.title, style=f"bold {_STYLES.get(summary.status, '')}".strip()),
        Padding(rows, (1, 0, 0, 2)),
    ]
    if content.predicted:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
        table.add_column("")
        table.add_column("predicted", justify="right")
        table.add_column("measured", justify="right")
        table.add_column("")
        for row in content.predicted:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(Padding(table, (1, 0, 0, 2)))
    if content.sample:
        parts += [Text("\nsample", style="bold"), Padding(Text(content.sample), (0, 0, 0, 2))]
    if content.commands:
        commands = Text("\n".join(content.commands), style="cyan", no_wrap=True, overflow="ignore")
        parts += [Text("\nnext", style="bold"), Padding(commands, (0, 0, 0, 2))]
    return Group(*parts)


def _rows(summary: Summary, directory: Path | None) -> list[tuple[str, str]]:
    losses = [loss for _, loss in summary.loss_curve if loss is not None]
    loss = f"{figure(losses[0])} {sparkline(losses)} {figure(summary.final_loss)}" if losses else ""
    held_out = metrics_text(summary.eval)
    if held_out and summary.eval_step not in {None, summary.steps}:
        held_out += f" (after step {summary.eval_step})"
    shares = " ".join(map(figure, summary.shares))
    workers = f"{summary.workers} (shares {shares}) · {counted(summary.generations, 'generation')}"
    cost = "" if summary.cost is None else figure(summary.cost)
    if cost and summary.priced_nodes < summary.nodes:
        cost += f" for {summary.priced_nodes} of {summary.nodes} nodes, the others have no price"
    checkpoints = "none"
    if summary.checkpoints:
        checkpoints = f"{summary.checkpoints}, last after step {summary.checkpoint_step}: "
        checkpoints += printable_line(str(summary.checkpoint_path))
    notes = dict.fromkeys(str(notice["what"]) for notice in summary.notices)
    return [
        ("error", printable_line(summary.error or "")),
        ("loss", loss),
        ("held out", held_out),
        ("speed", _speed(summary)),
        ("workers", workers if summary.workers else ""),
        ("exchanged", _exchanged(summary)),
        ("updates by", printable_line(summary.sync)),
        ("batch", _batch(summary)),
        ("data", _data(summary)),
        ("storage", _storage(summary)),
        ("cost", cost),
        ("time in steps", _time(summary)),
        ("goodput", goodput_text(summary.goodput)),
        ("used", printable_line(usage_text(summary.usage))),
        ("checkpoints", checkpoints),
        ("recoveries", _recoveries(summary)),
        ("notes", printable_line("; ".join(notes))),
        ("run directory", printable_line(str(directory)) if directory is not None else ""),
    ]


def _speed(summary: Summary) -> str:
    parts = []
    if summary.samples_per_s is not None:
        # From zero: a rate that hardly changes looks like one.
        curve = sparkline([rate for _, rate in summary.rate_curve], low=0.0)
        parts.append(f"{curve} {figure(summary.samples_per_s)} samples/s".lstrip())
    if summary.first_step_s is not None:
        parts.append(f"first step after {duration(summary.first_step_s)}")
    if summary.train_s:
        parts.append(f"training {duration(summary.train_s)}")
    return " · ".join(parts)


def _exchanged(summary: Summary) -> str:
    if not summary.bytes_dense:
        return ""
    text = f"{byte_count(summary.bytes_sent)} sent"
    if abs(summary.bytes_sent - summary.bytes_dense) > _LEAST * summary.bytes_dense:
        part = percent(summary.bytes_sent / summary.bytes_dense)
        text += f", {part} of the {byte_count(summary.bytes_dense)} of a dense exchange"
        if summary.bytes_sent:
            text += f" ({summary.bytes_dense / summary.bytes_sent:.1f} times fewer)"
    if summary.hidden_s > 0.0:
        hidden, exposed = duration(summary.hidden_s), duration(summary.exposed_s)
        text += f" · in {hidden} of computing and {exposed} of waiting"
    return text


def _batch(summary: Summary) -> str:
    """At which batch more samples a step begin to help little."""
    if summary.noise_scale is None:
        return ""
    scale = figure(summary.noise_scale)
    return f"gradient noise scale {scale} samples: batches far above it save few steps"


def _data(summary: Summary) -> str:
    """What was prepared; bad rows are among the notes."""
    splits: dict[str, dict[str, Any]] = summary.data.get("splits", {})
    texts = []
    for name, split in splits.items():
        how = [f"{split['cached_blocks']} cached"] if split["cached_blocks"] else []
        if split["made_blocks"]:
            how.append(f"{split['made_blocks']} made in {duration(split['seconds'])}")
        which = "" if name == "train" else f" {name.replace('_', ' ')}"
        blocks = counted(split["blocks"], "block")
        texts.append(f"{split['rows']} rows{which} in {blocks}: {', '.join(how)}")
    return printable_line(" · ".join(texts))


def _storage(summary: Summary) -> str:
    data = summary.data
    if not data:
        return ""
    parts = [f"{byte_count(data['bytes'])} on disk"]
    if data["access_s"] is not None:
        text = f"an epoch is read in {duration(data['access_s'])}"
        if data["access_s_per_gb"] is not None:
            text += f" ({duration(data['access_s_per_gb'])} a GB)"
        parts.append(text)
    if data["cost_per_month"] is not None:
        parts.append(f"costs {figure(data['cost_per_month'])} a month")
    if data["efficiency"] is not None:
        parts.append(f"efficiency {figure(data['efficiency'])}")
    return " · ".join(parts)


def _time(summary: Summary) -> str:
    shares = (
        ("computing", summary.compute_share),
        ("waiting for data", summary.data_share),
        ("waiting for the exchange", summary.exchange_share),
    )
    texts = {name: f"{name} {percent(share)}" for name, share in shares if share is not None}
    cold, warm = summary.cold_data_share, summary.warm_data_share
    if cold is not None and warm is not None and "waiting for data" in texts:
        texts["waiting for data"] += f" (first epoch {percent(cold)}, later {percent(warm)})"
    return " · ".join(texts.values())


def goodput_text(parts: Mapping[str, float]) -> str:
    """Where the workers' time went, those parts that are worth a word; empty where nobody knows."""
    whole_s = parts.get("whole_s", 0.0)
    if not whole_s:
        return ""
    seconds = ((label, sum(parts[name] for name in names)) for label, names in PARTS)
    texts = [f"{label} {percent(s / whole_s)}" for label, s in seconds if s >= _LEAST * whole_s]
    return f"of {duration(whole_s)} of all workers: {' · '.join(texts)}"


def _recoveries(summary: Summary) -> str:
    """How many of each kind, and behind it what they were."""
    texts = []
    for kind, name in NAMES.items():
        found = [text_of(recovery) for recovery in summary.recoveries if recovery["kind"] == kind]
        if found:
            texts.append(f"{counts_text({name: len(found)})} ({'; '.join(found)})")
    return printable_line(", ".join(texts) or "none")


def _predicted(summary: Summary) -> list[tuple[str, str, str, str]]:
    """What a run as a whole was to take, and then what a step is made of."""
    rows = [_printable(Compared.from_record(one).texts) for one in summary.compared]
    rows += [_toured(one) for one in summary.toured]
    told = {one["name"] for one in summary.compared}
    sure = [summary.predicted.get(name) for name in _INTERVAL]
    known = [x for x in sure if isinstance(x, int | float) and x > 0]
    for name, predicted in summary.predicted.items():
        if isinstance(predicted, bool) or not isinstance(predicted, int | float):
            continue
        if name in _INTERVAL or name in told:
            continue
        measured = summary.measured.get(name)
        off = (
            f"{100 * (measured / predicted - 1):+.0f}%"
            if measured is not None and predicted
            else ""
        )
        if name == "step_s" and len(known) == len(_INTERVAL):
            off = f"{off}  likely {' to '.join(map(figure, known))}".lstrip()
        label = printable_line(_LABELS.get(name, name))
        rows.append((label, figure(predicted), figure(measured), off))
    return rows


def _toured(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A point of a tour: seconds of a step."""
    predicted_s, measured_s = one.get("predicted_s"), one["measured_s"]
    notes = [f"{100 * (measured_s / predicted_s - 1):+.0f}%"] if predicted_s else []
    if predicted_s and one.get("high_s"):
        notes.append(f"likely {figure(one['low_s'])} to {figure(one['high_s'])}")
    label = f"s per step, {one['point']}"
    return _printable((label, figure(predicted_s), figure(measured_s), ", ".join(notes)))


def _printable(texts: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    label, predicted, measured, notes = map(printable_line, texts)
    return label, predicted, measured, notes


def summary_html(summary: Summary, directory: Path | None = None) -> str:
    """The summary as HTML without scripts or outside addresses; every text in it is escaped."""
    content = page(summary, directory)
    rows = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in content.rows)
    parts = [f"<b>{escape(content.title)}</b>", f"<table>{rows}</table>"]
    if content.predicted:
        cells = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in content.predicted
        )
        head = "<tr><th></th><th>predicted</th><th>measured</th><th></th></tr>"
        parts.append(f"<table>{head}{cells}</table>")
    if content.sample:
        parts.append(f"<pre>{escape(content.sample)}</pre>")
    return f"<div>{''.join(parts)}</div>"


def plan_text(plan: Plan) -> str:
    """Members with their shares, what a step is expected to take, and what by other ways."""
    head = (
        f"{plan.job}: {len(plan.members)} member(s), {plan.global_batch} samples per step in "
        f"{plan.micro_batches} micro-batches, {plan.steps_per_epoch} steps per epoch, "
        f"{plan.parameters:,} parameters ({byte_count(plan.state_bytes)} of state)"
    )
    rows = plan.member_rows()
    members = _records_table(rows[:_SHOWN])
    if len(rows) > _SHOWN:
        members += f"\n  ... and {len(rows) - _SHOWN} more"
    tables = [members, _records_table(plan.prediction_rows())]
    if plan.alternatives:
        tables.append(_records_table(plan.alternative_rows()))
    if plan.roles is not None:
        tables += [_records_table(plan.role_rows()), printable_line(plan.roles.why)]
    if plan.storage is not None:
        tables.append(_records_table(plan.storage.rows()))
    advice = [plan.advice()] if plan.advice() else []
    if plan.kept_s is not None:
        advice.append(f"measured {duration(plan.kept_s)} ago: --measure measures again")
    return "\n\n".join([printable_line(head), *tables, *advice])


def _records_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as a table with their names above; numbers to the right."""
    if not rows:
        return ""
    cells = [
        [printable_line(x) if isinstance(x, str) else figure(x) for x in row.values()]
        for row in rows
    ]
    left = [isinstance(value, str) for value in rows[0].values()]
    return "\n".join(table([list(rows[0]), *cells], left=left))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A job that went through every room once; nothing of it is left.

    Attributes:
        status: `finished`, or `stopped` where someone asked it to end early.
        first_step_s: From the command to the first committed step; None: there was none.
        step_s: Of the last step, from commit to commit; None: it was not measured.
        measures: Of the held-out samples; empty where the task holds none out.
        checkpoint_bytes: State that was written to `checkpoint_place` and read back.
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
    steps, workers = counted(tried.steps, "step"), counted(tried.workers, "worker")
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
