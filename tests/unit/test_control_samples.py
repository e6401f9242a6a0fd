"""Members whose samples are not the same do not begin, and do not join."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import MemberState
from tests.control_events import ready
from tests.control_job import control, of, only
from tests.unit.test_control_growing import to, two

SEEN = {"train/63": "aa", "train/31": "bb", "held_out/7": "cc"}


def saw(member: int, held_out: int | None = 8, **other: str) -> e.MemberReady:
    seen = SEEN | {name.replace("_at_", "/"): digest for name, digest in other.items()}
    return replace(ready(member), fingerprint=seen, held_out=held_out)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (saw(1, train_at_31="other"), "different samples: train/31"),
        (saw(1, held_out_at_7="other"), "different samples: held_out/7"),
        (saw(1, held_out=9), "different samples: 8 and 9 are held out"),
    ],
    ids=["train", "held out", "how many"],
)
def test_two_that_do_not_see_the_same_do_not_begin(other: e.MemberReady, says: str) -> None:
    job = control()
    job.start(0.0)
    job.on(saw(0), 1.0)
    finish = only(c.Finish, job.on(other, 2.0))
    assert finish.status == "failed"
    assert f"Task.data gives member 0 and 1 {says}" in finish.error
    assert "\n\nhint: every worker calls Task.data" in finish.error


@pytest.mark.parametrize(
    "other",
    [saw(1), ready(1), saw(1, held_out=None), replace(saw(1), fingerprint={"train/5": "x"})],
    ids=["the same", "of an old version", "of an older one", "others were too slow"],
)
def test_two_that_may_see_the_same_begin(other: e.MemberReady) -> None:
    job = control()
    job.start(0.0)
    job.on(saw(0), 1.0)
    assert of(c.Form, job.on(other, 2.0))


def test_one_that_does_not_see_what_the_others_do_does_not_join() -> None:
    job = two()
    to(job, 5)
    job.on(e.CapacityChanged(workers=3), 2.0)
    first = job._state.data.first
    assert first is not None
    job._state.data.first = replace(first, fingerprint=SEEN)
    commands = job.on(saw(2, train_at_63="other"), 8.0)
    assert job.members[2] is MemberState.RELEASED
    assert only(c.Release, commands).members == (2,)
    assert (
        "gives it other samples than the others: train/63" in only(c.Notice, commands).detail["why"]
    )
    assert not of(c.Finish, commands)
