"""What `train --try` says at its end."""

from __future__ import annotations

from dataclasses import replace

from raycloud.report.summary_text import Tried, tried_text

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
