"""A GPU that fails costs its member, and nothing else. There is none here: what torch raises is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycloud.commands import Form
from raycloud.events import MemberDone, MemberLost
from raycloud.step.contract import raised
from raycloud.worker.loop import Loop
from tests.fellows import Fellows
from tests.live_tasks import Steady
from tests.lockstep import difference, job, plain_loop

ECC = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nSearch for ...")


class Calm(Steady):
    """Members share the generator of torch here: nothing is drawn."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, branch=False)


def _in_a_pass() -> Exception:
    error = raised("the backward pass", ECC)
    error.__cause__ = ECC
    return error


@pytest.mark.parametrize("error", [ECC, _in_a_pass()], ids=["between passes", "in a pass"])
def test_its_member_is_lost_and_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._one_step

    def failing(loop: Loop) -> None:
        if (loop.seat.member, loop.step) == (1, 2):
            raise error
        step(loop)

    monkeypatch.setattr(Loop, "_one_step", failing)
    asked = job(task=Calm, steps=4)
    fellows = Fellows(tmp_path, asked, 2, joining=0, task=Calm)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    fellows.until(MemberLost, [1])
    (lost,) = fellows.of(MemberLost, 1)
    assert lost.reason == "its GPU failed: CUDA error: uncorrectable ECC error encountered"
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=2))
    fellows.until(MemberDone, [0])
    reference = plain_loop(asked, Calm(), 4)
    assert difference(fellows.replica(0).model, reference) <= 1e-12
