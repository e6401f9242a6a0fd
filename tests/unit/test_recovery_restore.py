"""Members go back to a checkpoint in place: real members, and a real checkpoint."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.checkpoint import DamagedError, Manifest, Store, open_store, publish
from raycloud.checkpoint.payload import write_part
from raycloud.commands import Back, Form, Halt, Publish, Save
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberDone,
    MemberFailed,
    MemberReady,
    PartWritten,
    StepNotFinite,
    StepsCommitted,
)
from raycloud.net.transport import Abandoned
from raycloud.on_ray import checkpoints
from raycloud.order import Ledger
from raycloud.recovery import restore
from raycloud.recovery.restore import read_together
from raycloud.spec import ErrorsSection, Job
from raycloud.worker.member import Member
from tests.checkpoints import damage, manifest_of
from tests.fellows import WAIT_S, Fellows
from tests.live import wait_for
from tests.live_tasks import Paced, Steady
from tests.lockstep import difference, job, never, plain_loop
from tests.loopback import Loopback
from tests.sockets import together

STEPS = 60


def asked(folder: Path) -> Job:
    settings = {"gate": str(folder / "gate"), "pause_s": 0.002, "dropout": 0.0, "norm": True}
    return job(task=Paced, steps=STEPS, settings=settings, checkpoint={"every_steps": None})


def saved(fellows: Fellows, job: Job, folder: Path, change: Save | Halt) -> int:
    """Members 0 and 1 begin, and write a checkpoint, which is published; the step before it."""
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    fellows.prepare(1, change, (0, 1))
    fellows.until(PartWritten, (0, 1))
    parts = {(e.replica, e.position): e.part for e in fellows.of(PartWritten)}
    [step] = {e.step for e in fellows.of(PartWritten)}
    [samples] = {e.samples for e in fellows.of(MemberReady, 0)}
    ledger = Ledger(samples=samples).state()
    command = Publish(step=step, parts=parts)
    manifest = checkpoints.manifest_of(command, job, samples=samples, ledger=ledger)
    publish(open_store(folder), manifest)
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
    fellows.members.append(Member(told))
    fellows.until(MemberReady, (number,))


def left_alone(folder: Path) -> tuple[Fellows, Job, int]:
    """Members 0 and 1 have ended after a checkpoint of this step, and 2 is there to go back."""
    job, kept = asked(folder), folder / "kept"
    fellows = Fellows(kept, job, 2, joining=0)
    step = saved(fellows, job, kept, Halt(reason="nobody is to compute while another builds"))
    fellows.until(MemberDone, (0, 1))
    comes(fellows, 2, step)
    return fellows, job, step


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


def test_one_that_comes_where_nobody_is_left_goes_back(tmp_path: Path) -> None:
    fellows, job, step = left_alone(tmp_path)
    back = Back(step=step, generation=1)
    fellows.form(Form(generation=1, members=(2,), shares=(8,), step=step, settled=1, back=back))
    assert formed(fellows, 1) == step
    check_end(fellows, job, (2,))
    assert fellows.of(StepsCommitted, 2)[0].first_step == step


def test_who_has_gone_back_gives_the_state_to_one_that_was_not_told_to(tmp_path: Path) -> None:
    """Its meeting broke once the driver knew of it, and those that meet then are not told again."""
    fellows, job, step = left_alone(tmp_path)
    comes(fellows, 3, step)
    form = Form(generation=1, members=(9, 2), shares=(4, 4), step=step, settled=1)
    back = replace(form, back=Back(step=step, generation=1))
    fellows.members[2].form(fellows._meeting(back, 1))
    life = fellows.members[2]._worker
    assert life is not None
    wait_for("it goes back", lambda: life._restoring._gone_back == 1)
    fellows.form(replace(form, generation=2, members=(3, 2)))
    assert formed(fellows, 2) == step
    check_end(fellows, job, (3, 2))


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
    fellows.members.append(fellows.members[1].rejoin_as(2))
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
    fellows, _, step = left_alone(tmp_path)
    form = Form(generation=1, members=(2,), shares=(8,), step=step, settled=1)
    fellows.form(replace(form, back=Back(step=step, generation=1)))
    assert formed(fellows, 1) == step
    fellows.form(replace(form, generation=2, step=0, back=Back(step=0, generation=2)))
    assert f"it began from step {step}" in failure(fellows.members[2])


class Counting:
    """A store that counts how often each file is read."""

    def __init__(self, store: Store) -> None:
        self.reads: Counter[str] = Counter()
        self._store, self._turn = store, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: str) -> bytes:
        with self._turn:
            self.reads[name] += 1
        return self._store.read(name)


def published(store: Store, parts: int, values: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """A checkpoint of so many parts, and its tensors."""
    tensors = {
        f"model/{rank}": torch.randn(values, generator=torch.Generator().manual_seed(rank))
        for rank in range(parts)
    }
    tensors["model/0"] = torch.tensor(3)
    records = [
        write_part(store, step=1, rank=rank, parts=parts, tensors={name: tensor})
        for rank, (name, tensor) in enumerate(tensors.items())
    ]
    manifest = manifest_of(1, records)
    publish(store, manifest)
    return manifest, tensors


@pytest.mark.parametrize(("parts", "size"), [(7, 1), (7, 3), (2, 3), (1, 2)])
def test_members_read_each_part_once_and_all_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, size: int
) -> None:
    monkeypatch.setattr(restore, "_CHUNK_BYTES", 1000)
    store = Counting(open_store(tmp_path))
    manifest, tensors = published(store, parts, 700)
    read = [partial(read_together, store, manifest, m, never) for m in Loopback(size).members]
    for found in together(read):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert store.reads == {part.file: 1 for part in manifest.parts}


def test_a_part_that_is_damaged_is_noticed_by_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest, _ = published(store, 3, 10)
    damage(store, manifest.parts[1].file)
    read = [partial(read_together, store, manifest, m, never) for m in Loopback(2).members]

    def why(work: Callable[[], object]) -> str:
        with pytest.raises(DamagedError) as told:
            work()
        return str(told.value)

    for said in together(partial(why, work) for work in read):
        assert f"{manifest.parts[1].file} is not what was written" in said


def test_a_part_that_cannot_be_read_ends_it_for_the_others_once_they_are_told(
    tmp_path: Path,
) -> None:
    store, over = open_store(tmp_path), threading.Event()
    manifest, _ = published(store, 2, 10)
    store.remove_all([manifest.parts[1].file])
    first, second = Loopback(2).members

    def reader() -> str:
        with pytest.raises(DamagedError) as told:
            read_together(store, manifest, second, over.is_set)
        over.set()
        return str(told.value)

    def other() -> str:
        with pytest.raises(Abandoned) as told:
            read_together(store, manifest, first, over.is_set)
        return str(told.value)

    said, _ = together([reader, other])
    assert manifest.parts[1].file in said
