"""What people see: the progress line, the summary in plain, in a terminal, and in a notebook."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, Group

from raycloud.clock import VirtualClock
from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    MemberSpawned,
    Noticed,
    PartWritten,
    Printed,
    Recovered,
    RunStarted,
    StepsCommitted,
    StopRequested,
)
from raycloud.planner.cost import Prediction, Profile
from raycloud.planner.inventory import Inventory, Node
from raycloud.planner.plan import Plan, PlannedMember, from_json, make
from raycloud.planner.speed import Speed
from raycloud.report.figures import byte_count, duration, figure, printable, sparkline
from raycloud.report.notes import note
from raycloud.report.progress import Follower, status_renderable, status_text
from raycloud.report.run_status import RunStatus, status_of, total_steps
from raycloud.report.state import Tally
from raycloud.report.summary import Summary
from raycloud.report.summary_text import (
    Tried,
    plan_text,
    summary_html,
    summary_renderable,
    summary_text,
    tried_text,
)
from raycloud.spec import Job, SyncPoint
from tests import logs
from tests.logs import tally_of

SUMMARY = Summary(
    status="finished",
    steps=300,
    samples=9600,
    first_step_s=6.13,
    train_s=86.4,
    samples_per_s=110.74,
    final_loss=1.98765,
    eval={"loss": 2.01, "bits_per_byte": 2.9},
    workers=2,
    generations=2,
    recoveries=[{"kind": "resumed", "t": 1.0, "step": 200, "steps_again": 30, "seconds": 5.5}],
    bytes_sent=48_200_000,
    bytes_dense=96_400_000,
    predicted={"step_s": 0.25, "exchange_s": None, "bytes_per_step": 80_000, "odd": 1.0},
    measured={"step_s": 0.288, "bytes_per_step": 80_333.0},
    job="gpt",
    wall_s=98.0,
    shares=[4, 3],
    eval_step=300,
    compute_share=0.913,
    data_share=0.004,
    exchange_share=0.08,
    checkpoints=3,
    checkpoint_step=300,
    checkpoint_path="runs/gpt-1/checkpoints/300",
    loss_curve=[[1, 5.5], [100, 4.0], [200, 3.0], [300, 1.98]],
    notices=[{"t": 1.0, "what": "slow link", "member": 1, "detail": {}}] * 2,
    sample="def f(x):\n\treturn x\x1b[31m\n",
)

PLAIN = """\
gpt finished: 300 steps, 9600 samples in 1:38

  loss           5.5 █▅▃▁ 1.988
  held out       loss 2.01 · bits_per_byte 2.9
  speed          110.7 samples/s · first step after 6.1 s · training 1:26
  workers        2 (shares 4 3) · 2 generations
  exchanged      48.2 MB sent, 50% of the 96.4 MB of a dense exchange (2.0 times fewer)
  time in steps  computing 91% · waiting for data 0.4% · waiting for the exchange 8%
  checkpoints    3, last after step 300: runs/gpt-1/checkpoints/300
  recoveries     1 resumed (at step 200, 5.5 s until training went on)
  notes          slow link
  run directory  runs/my gpt

                                predicted      measured
  seconds per step                   0.25         0.288  +15%
  bytes per step and member         80000         80333  +0%
  odd                                   1             -

sample
  def f(x):
      return x?[31m

next
  raycloud report 'runs/my gpt'
  tensorboard --logdir 'runs/my gpt'"""


TRACE = 'Traceback (most recent call last):\n  File "task.py", line 7, in loss\n    1 / 0\n'


def commit(member: int, first: int, last: int) -> StepsCommitted:
    report = logs.commit(member, first, last, loss=2.3456)
    return replace(report, wall_s=1.0, bytes_sent=1_000_000, bytes_dense=1_000_000)


FORMED = GenerationFormed(generation=0, members=(0, 1), shares=(1, 1), first_step=0)
STARTED = RunStarted(job="gpt", version="0.1.0")


def rendered(renderable: object, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=width, highlight=False).print(renderable)
    return file.getvalue()


def test_summary_in_plain() -> None:
    assert summary_text(SUMMARY, Path("runs/my gpt")) == PLAIN


def test_summary_in_a_terminal() -> None:
    text = rendered(summary_renderable(SUMMARY, Path("runs/my gpt")))
    assert "\x1b[1;32mgpt finished" in text
    assert "\x1b[31m\n" not in text  # what the model wrote does not reach the terminal as a command
    for line in ("█▅▃▁", "+15%", "raycloud report 'runs/my gpt'"):
        assert line in text


def test_summary_in_a_notebook() -> None:
    html = summary_html(replace(SUMMARY, sample="<script>"))
    assert "<th>held out</th>" in html
    assert "<td>+15%</td>" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


@pytest.mark.parametrize(("status", "checkpoints"), [("stopped", 1), ("failed", 1), ("failed", 0)])
def test_an_unfinished_run_says_how_to_go_on(status: str, checkpoints: int) -> None:
    lost = {"kind": "member lost", "t": 1.0, "step": 5, "member": 1, "seconds": None}
    summary = replace(
        logs.fold([]), status=status, steps=5, samples=40, recoveries=[lost],
        error="member 1 died\nreally", checkpoints=checkpoints,
    )  # fmt: skip
    text = summary_text(summary, Path("r"))
    assert text.startswith(f"run {status}: 5 steps, 40 samples\n")
    assert "error          member 1 died really" in text
    assert "1 lost (member 1 at step 5)" in text
    assert ("raycloud train --resume --run-dir r" in text) == bool(checkpoints)
    assert rendered(summary_renderable(summary, Path("r")))


def status(tally: Tally, steps: int | None) -> RunStatus:
    now_t = (tally.session.ended_t or 0.0) if tally.session else 0.0
    return status_of(tally, now_t=now_t, steps=steps)


def test_progress_before_the_first_step() -> None:
    assert status_text(status(tally_of((0.0, STARTED)), 30)) == "starting"
    spawned = [(1.0, MemberSpawned(member=m)) for m in (0, 1)]
    tally = tally_of((0.0, STARTED), *spawned, (2.0, logs.ready(0)))
    assert status_text(status(tally, 30)) == "starting: 1 of 2 workers ready"
    assert status_text(status(tally_of((0.0, STARTED), (1.0, FORMED)), 30)) == "step 0/30"


def test_progress_while_training() -> None:
    reports = [(t, commit(m, int(t) - 2, int(t) - 1)) for t in (2.0, 3.0, 4.0) for m in (0, 1)]
    tally = tally_of((0.0, STARTED), (1.0, FORMED), *reports)
    expected = "step 3/30 · loss 2.346 · 8 samples/s · 27.0 s left · 2 workers · 6.0 MB sent"
    expected += " · generation 0"
    assert status_text(status(tally, 30)) == expected
    assert status_text(status(tally, None)).startswith("step 3 · loss")
    assert "left" not in status_text(status(tally, 3))
    line = rendered(status_renderable(status(tally, 30)), width=120)
    assert "━" in line
    assert "27.0 s left" in line
    assert rendered(Group(status_renderable(status(tally, 30))), width=40).count("\n") == 1


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (STARTED, None),
        (
            RunStarted(job="x", version="1", resumed_from_step=40),
            "going on from the checkpoint of step 40",
        ),
        (FORMED, "generation 0 from step 0: 2 workers, shares 1 1"),
        (MemberLost(member=1, reason="died\x1b[2J"), "lost member 1: died?[2J"),
        (
            MemberFailed(member=1, error="TaskError", message="loss()\nraised"),
            "member 1 failed: TaskError: loss() raised",
        ),
        (
            MemberFailed(member=1, error="TaskError", message=f"loss() raised\n{TRACE}"),
            "member 1 failed: TaskError: loss() raised at task.py:7 in loss: 1 / 0",
        ),
        (Printed(member=1, text="rows: 3\x1b[2J"), "member 1 prints: rows: 3?[2J"),
        (
            CheckpointPublished(step=4, path="x", state_bytes=2000, write_s=1.0),
            "checkpoint of step 4 (2.0 kB)",
        ),
        (Evaluated(step=4, metrics={"loss": 2.0}), "held out after step 4: loss 2"),
        (StopRequested(reason="Ctrl-C"), "stopping after a checkpoint: Ctrl-C"),
        (
            Noticed(what="no NCCL", member=1, detail={"used": "gloo"}),
            "note: member 1: no NCCL (used gloo)",
        ),
        (Noticed(what="odd"), "note: odd"),
        (
            Recovered(generation=1, lost=(1,), cause="died", detected_s=1.0, resumed_s=1.25),
            "went on after 0.2 s, 0 steps lost",
        ),
        (PartWritten(member=0, step=1, part={}, blocked_s=0.0, write_s=0.0), None),
    ],
)
def test_notes(event: Event, text: str | None) -> None:
    assert note(event) == text


def job(steps: int | None = 30, epochs: int | None = None) -> Job:
    values = {"task": "pkg.mod:Task", "steps": steps, "epochs": epochs}
    return Job.model_validate({**values, "global_batch": 8, "micro_batch": 4})


def test_what_several_members_say_alike_is_shown_once() -> None:
    said: list[str] = []
    follower = Follower(
        job(), VirtualClock(), say=said.append, draw=print, every_s=5.0, only_steps=True
    )
    for member, text in [(0, "a"), (1, "a"), (1, "b"), (1, "a"), (0, "a"), (0, "b"), (0, "a")]:
        follower.see(Printed(member=member, text=text))
    for member in (0, 1):
        follower.see(MemberFailed(member=member, error="TaskError", message=f"oh\n{TRACE}"))
    assert said == [
        "member 0 prints: a",
        "member 1 prints: b",
        "member 1 prints: a",
        "member 0 prints: a",
        "member 0 failed: TaskError: oh at task.py:7 in loss: 1 / 0",
    ]


def followed(*, only_steps: bool) -> list[str]:
    said: list[str] = []
    clock = VirtualClock()
    follower = Follower(
        job(),
        clock,
        say=said.append,
        draw=lambda status: said.append(f"[{status.step}/{status.steps}]"),
        every_s=5.0,
        only_steps=only_steps,
    )
    follower.see(STARTED)
    clock.advance(1.0)
    follower.see(FORMED)
    for step in range(12):
        for member in (0, 1):
            follower.see(commit(member, step, step + 1))
        clock.advance(1.0)
    follower.end()
    follower.end()
    return said


def test_following_in_plain() -> None:
    formed = "generation 0 from step 0: 2 workers, shares 1 1"
    assert followed(only_steps=True) == [formed, "[1/30]", "[5/30]", "[10/30]", "[12/30]"]


def test_following_in_a_terminal() -> None:
    formed = "generation 0 from step 0: 2 workers, shares 1 1"
    seen = followed(only_steps=False)
    assert seen[:3] == ["[0/30]", formed, "[1/30]"]
    assert seen[-1] == "[12/30]"


def test_total_steps() -> None:
    assert total_steps(job(), 0) == 30
    assert total_steps(job(steps=None, epochs=2), 0) is None
    assert total_steps(job(steps=None, epochs=2), 100) == 26


def test_plan_in_plain() -> None:
    speed = Speed(fixed_s=0.0, micro_batch_s=0.25)
    members = tuple(
        PlannedMember(member=m, node="here", share=share, speed=speed)
        for m, share in enumerate((3, 1))
    )
    made = Plan(
        job="gpt",
        members=members,
        micro_batches=4,
        global_batch=16,
        steps_per_epoch=10,
        sync=SyncPoint(period=1, topology="ring", staleness=0, codec="none"),
        predicted=Prediction(
            step_s=0.75, samples_per_s=21.333, compute_s=0.75, exchange_s=None, bytes_per_step=4
        ),
        parameters=1_000_000,
        gradient_bytes=4,
        state_bytes=12_000_000,
    )
    lines = plan_text(made).splitlines()
    assert lines[0] == (
        "gpt: 2 member(s), 16 samples per step in 4 micro-batches, 10 steps per epoch, "
        "1,000,000 parameters (12.0 MB of state)"
    )
    assert lines[2:5] == [
        "  member  node  share  samples  compute_s",
        "       0  here      3       12       0.75",
        "       1  here      1        4       0.25",
    ]
    assert any(line.split()[:2] == ["exchange_s", "-"] for line in lines)


def test_a_plan_names_machines_as_people_do() -> None:
    speed = Speed(fixed_s=0.0, micro_batch_s=0.25)
    nodes = [Node(name=name, host=host) for name, host in (("a1", "x"), ("b2", "x"), ("c3", "y"))]
    made = make(
        Job(task="m:T", steps=1, global_batch=3, micro_batch=1, elastic={"max_workers": 3}),
        Inventory(nodes=tuple(nodes)),
        Profile(samples=9, parameters=1, gradient_bytes=4, state_bytes=4, speeds=(speed,)),
    )
    assert [row["node"] for row in made.member_rows()] == ["x a1", "x b2", "y"]
    assert from_json(made.to_json()) == made


def test_figures() -> None:
    assert [byte_count(n) for n in (0, 999_960, 2.5e15)] == ["0 B", "1.0 MB", "2500.0 TB"]
    assert [duration(s) for s in (0.0, 59.96, 60.0)] == ["0.00 s", "60.0 s", "1:00"]
    assert [figure(x) for x in (math.nan, math.inf, 1e12, -1e-7, 999.96)] == [
        "nan",
        "inf",
        "1e+12",
        "-1e-07",
        "1000",
    ]
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0, None, math.nan], width=4) == "▁▁  "
    assert printable("é\r\n\x9b\u202e") == "é\n??"


TRIED = Tried(
    job="gpt",
    status="finished",
    steps=2,
    workers=2,
    samples=64,
    first_step_s=5.25,
    step_s=0.5,
    measures={"loss": 5.5, "accuracy": 0.25},
    checkpoint_bytes=56_600,
    checkpoint_place="runs",
    wall_s=9.0,
)


def test_all_of_it() -> None:
    assert tried_text(TRIED, "raycloud train gpt.yaml").splitlines() == [
        "gpt works: 2 steps, 64 samples, 2 workers",
        "  first step   5.2 s after the command, the last step took 0.50 s",
        "  held out     loss 5.5 · accuracy 0.25",
        "  checkpoint   56.6 kB written to runs and read back",
        "  in all       9.0 s; nothing was kept",
        "",
        "train it: raycloud train gpt.yaml",
    ]


def test_one_of_each_and_nothing_held_out() -> None:
    one = replace(TRIED, steps=1, workers=1, samples=32, measures={}, step_s=None)
    lines = tried_text(one, "raycloud train gpt.yaml").splitlines()
    assert lines[0] == "gpt works: 1 step, 32 samples, 1 worker"
    assert lines[1] == "  first step   5.2 s after the command"
    assert lines[2] == "  held out     nothing: the task holds no samples out"


def test_stopped() -> None:
    text = tried_text(replace(TRIED, status="stopped"), "raycloud train gpt.yaml")
    assert text == "gpt was stopped while it was tried; nothing was kept"
