"""Members go back to a checkpoint in place: real members, and a real checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.checkpoint import open_store, publish
from raycloud.commands import Back, Form, Halt, Publish, Save
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberDone,
    MemberFailed,
    MemberReady,
    Noticed,
    PartWritten,
    StepNotFinite,
    StepsCommitted,
)
from raycloud.on_ray.manifests import manifest_of
from raycloud.order import Ledger
from raycloud.spec import ErrorsSection, Job
from raycloud.training.member import Member
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Paced, Steady
from tests.lockstep import difference, job, plain_loop

STEPS = 60


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here they share a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def asked(folder: Path) -> Job:
    settings = {"gate": str(folder / "gate"), "pause_s": 0.002, "dropout": 0.0, "norm": True}
    return job(task=Paced, steps=STEPS, settings=settings, checkpoint={"every_steps": None})


def saved(fellows: Fellows, job: Job, folder: Path, change: Save | Halt) -> int:
    """Members 0 and 1 begin, and write a checkpoint, which is published; the step before it."""
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    fellows.prepare(1, change, (0, 1))
    fellows.until(PartWritten, (0, 1))
    parts: dict[int, Any] = {e.member: e.part for e in fellows.of(PartWritten)}
    [step] = {e.step for e in fellows.of(PartWritten)}
    [samples] = {e.samples for e in fellows.of(MemberReady, 0)}
    ledger = Ledger(samples=samples).state()
    command = Publish(step=step, parts=parts)
    publish(open_store(folder), manifest_of(command, job, samples=samples, ledger=ledger))
    return step


def formed(fellows: Fellows, generation: int) -> int:
    """The step at which this generation went on."""
    fellows.until(GenerationFormed, (), more=0)
    while True:
        found = [e for e in fellows.events if isinstance(e, GenerationFormed)]
        if found and found[-1].generation == generation:
            return found[-1].first_step
        for member in fellows.members:
            fellows.events += member.poll(0.01)


def comes(fellows: Fellows, number: int, back: int) -> None:
    """Another member is ready, which was told to go back to the checkpoint of this step."""
    first = fellows.members[0]
    told = replace(first._config, member=number, joins=True, back=back)
    fellows.members.append(Member(told, first._clock))
    fellows.until(MemberReady, (number,))


def check_end(
    fellows: Fellows, job: Job, members: tuple[int, ...], without: int | None = None
) -> None:
    (Path(job.settings["gate"])).touch()
    fellows.until(MemberDone, members)
    first, *others = [fellows.replica(member) for member in members]
    for other in others:
        mine, theirs = first.state.tensors(), other.state.tensors()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    task = Steady(dropout=0.0, norm=True)
    reference = plain_loop(job, task, STEPS, passed_over=lambda span: span.step == without)
    assert difference(first.model, reference) <= 1e-9


def test_those_that_have_computed_go_back_once_and_a_new_one_with_them(tmp_path: Path) -> None:
    """In place: processes, models and data stay, and what was computed since counts no more."""
    job, folder = asked(tmp_path), tmp_path / "kept"
    fellows = Fellows(folder, job, 2)
    step = saved(fellows, job, folder, Save())
    fellows.come_to(0, step + 4)
    back = Back(step=step, generation=1)
    three, shares = (0, 1, 2), (3, 3, 2)
    fellows.form(Form(generation=1, members=three, shares=shares, step=step, settled=1, back=back))
    assert formed(fellows, 1) == step
    fellows.come_to(2, step + 3)
    fellows.form(  # as where one of them is lost before their meeting was known
        Form(generation=2, members=(0, 2), shares=(5, 3), step=step, settled=1, back=back)
    )
    assert formed(fellows, 2) >= step + 3
    check_end(fellows, job, (0, 2))
    told = [e for e in fellows.of(StepsCommitted, 2) if e.last_step > e.first_step]
    assert (told[0].first_step, told[-1].last_step) == (step, STEPS)


def test_one_that_is_told_at_its_start_has_loaded_it_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = asked(tmp_path), tmp_path / "kept"
    fellows = Fellows(folder, job, 2, joining=0)
    step = saved(fellows, job, folder, Halt(reason="nobody is to compute while another builds"))
    fellows.until(MemberDone, (0, 1))
    comes(fellows, 2, step)
    monkeypatch.setattr(fellows.replica(2).state, "load", None)  # is not needed any more
    back = Back(step=step, generation=1)
    fellows.form(Form(generation=1, members=(2,), shares=(8,), step=step, settled=1, back=back))
    assert formed(fellows, 1) == step
    check_end(fellows, job, (2,))
    assert fellows.of(StepsCommitted, 2)[0].first_step == step


@pytest.mark.full(only="over real sockets: one that was silent goes back")
def test_one_that_was_silent_goes_back_like_all_others_and_has_none_of_its_states(
    tmp_path: Path,
) -> None:
    job, folder = asked(tmp_path), tmp_path / "kept"
    fellows = Fellows(folder, job, 2, joining=0)
    step = saved(fellows, job, folder, Save())
    back = Back(step=step, generation=1)
    form = Form(generation=1, members=(0, 1), shares=(5, 3), step=step, settled=1, back=back)
    fellows.form(form)
    assert formed(fellows, 1) == step
    fellows.come_to(1, step + 3)
    fellows.members.append(fellows.members[1].another(2))
    fellows.until(MemberReady, (2,))
    fellows.form(replace(form, generation=2, members=(2,), shares=(8,)))  # the same return
    assert formed(fellows, 2) == step
    check_end(fellows, job, (2,))
    assert fellows.of(StepsCommitted, 2)[0].first_step == step


def failure(member: Member) -> str:
    """Why it fails, for the checkpoint's sake."""
    told: list[Event] = []
    while not (failures := [e for e in told if isinstance(e, MemberFailed)]):
        told = member.poll(WAIT_S)
        assert told
    [failed] = failures
    assert failed.error == "CheckpointError"
    return failed.message


def test_one_that_is_gone_is_not_needed_where_others_have_the_state(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 1, joining=0)
    comes(fellows, 1, 7)
    assert "the checkpoint of step 7 could not be loaded ahead" in [
        event.what for event in fellows.of(Noticed, 1)
    ]
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(1, 3)
    check_end(fellows, job, (0, 1))


def test_those_whose_parameters_are_spoiled_say_so_and_go_back(tmp_path: Path) -> None:
    """And are of no use to another driver until they have."""
    job, folder = asked(tmp_path), tmp_path / "kept"
    job = job.model_copy(update={"errors": ErrorsSection(on_nan="rollback")})
    fellows = Fellows(folder, job, 2, joining=0)
    step = saved(fellows, job, folder, Save())
    fellows.come_to(0, step + 4)
    for member in (0, 1):
        spoiled = next(fellows.replica(member).model.parameters())
        spoiled.data.fill_(float("nan"))  # as an update may leave it; no forward pass wrote it
    fellows.until(StepNotFinite, (0, 1))
    first, _ = fellows.of(StepNotFinite)
    assert first.left_out in {first.step, first.step - 1}
    assert [member.survivor() for member in fellows.members] == [None, None]
    back = Back(step=step, generation=1, without=(first.left_out,))
    fellows.form(Form(generation=1, members=(0, 1), shares=(5, 3), step=step, settled=1, back=back))
    assert formed(fellows, 1) == step
    assert all(member.survivor() is not None for member in fellows.members)
    check_end(fellows, job, (0, 1), without=first.left_out)


def test_a_checkpoint_that_is_gone_is_told(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 1, joining=0)
    back = Back(step=7, generation=1)
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=7, back=back))
    assert "there is no checkpoint of step 7" in failure(fellows.members[0])


def test_one_that_has_loaded_a_checkpoint_does_not_begin_at_the_beginning(tmp_path: Path) -> None:
    job, folder = asked(tmp_path), tmp_path / "kept"
    fellows = Fellows(folder, job, 2, joining=0)
    step = saved(fellows, job, folder, Halt(reason="nobody is to compute while another builds"))
    fellows.until(MemberDone, (0, 1))
    comes(fellows, 2, step)
    back = Back(step=0, generation=1)
    fellows.form(Form(generation=1, members=(2,), shares=(8,), step=0, settled=1, back=back))
    assert f"it began from step {step}" in failure(fellows.members[2])
