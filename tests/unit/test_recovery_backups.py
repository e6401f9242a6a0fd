"""Members that back each other up: real ones, over real sockets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.commands import Form
from raycloud.events import MemberDone, StepsCommitted
from raycloud.net.stream import Arrivals, Place
from raycloud.order import deal
from raycloud.recovery import backups
from raycloud.spec import Job
from tests.fellows import Fellows
from tests.live_tasks import Late, Steady
from tests.lockstep import difference, job, plain_loop
from tests.tiers import variants

STEPS = 40
EPOCH = 5  # steps, of which the last has 3 micro-batches in place of 8


def asked(folder: Path, **changes: Any) -> Job:
    settings = {"claimed": str(folder / "late"), "after": 40, "dropout": 0.0, "norm": True}
    elastic = {"backup_micro_batches": 3, "max_workers": 2, "shares": [4, 4], "min_workers": 2}
    values = {"task": Late, "steps": STEPS, "settings": settings, "elastic": elastic}
    return job(**{**values, "checkpoint": {"every_steps": 1000}, **changes})


def check_end(fellows: Fellows, asked: Job, members: tuple[int, ...]) -> None:
    """All are alike, bit by bit, and what a single process computes."""
    fellows.until(MemberDone, members)
    first, *others = [fellows.replica(member) for member in members]
    for other in others:
        mine, theirs = first.state.tensors(), other.state.tensors()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    reference = plain_loop(asked, Steady(dropout=0.0, norm=True), STEPS)
    assert difference(first.model, reference) <= 1e-9


def computed(fellows: Fellows, member: int) -> int:
    """Micro-batches of this member that counted."""
    return sum(one.micro_batches for one in fellows.of(StepsCommitted, member))


def late_one(fellows: Fellows) -> int:
    """The member that takes longer."""
    tasks = [member._worker._task for member in fellows.members if member._worker is not None]
    [found] = [number for number, task in enumerate(tasks) if task.late]  # type: ignore[attr-defined]
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("most", variants(3, 0))
def test_who_is_late_computes_less_in_the_same_steps(tmp_path: Path, most: int) -> None:
    job = asked(tmp_path)
    elastic = job.elastic.model_copy(update={"backup_micro_batches": most})
    job = job.model_copy(update={"elastic": elastic})
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0, task=Late)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    check_end(fellows, job, (0, 1))
    late = late_one(fellows)
    parts = [deal((4, 4), 3 if step % EPOCH == EPOCH - 1 else 8) for step in range(STEPS)]
    share = sum(part[late] for part in parts)
    both = computed(fellows, 0) + computed(fellows, 1)
    assert both == sum(map(sum, parts))  # each of them, and each once
    if most:
        assert computed(fellows, late) < 0.8 * share
    else:
        assert computed(fellows, late) == share


@pytest.mark.timeout(120)
@pytest.mark.parametrize("goes", variants("late", "backup"))
def test_one_is_lost_while_it_is_backed_up_or_backs_up(tmp_path: Path, goes: str) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0, task=Late)
    fellows.form(Form(generation=0, members=(0, 1, 2), shares=(3, 3, 2), step=0))
    fellows.come_to(0, STEPS // 2)
    late = late_one(fellows)
    lost = late if goes == "late" else (late - 1) % 3
    fellows.members[lost].abandon(0)  # it is gone, as far as the others know
    left = tuple(member for member in range(3) if member != lost)
    fellows.form(Form(generation=1, members=left, shares=(4, 4), step=0))
    check_end(fellows, job, left)


@pytest.mark.full(only="backups: one that cannot connect")
@pytest.mark.timeout(120)
def test_who_cannot_connect_is_backed_up_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Elsewhere(Arrivals):
        """Tells another place than its own."""

        def __init__(self, address: str, *told: Any) -> None:
            super().__init__(address, *told)
            self.place = Place(address, 1, 7)

    missing = threading.Event()

    def note(self: backups.Backups, who: str, error: Exception) -> None:
        if not self._closed:
            told.append(f"{who}: {error}")
            missing.set()

    monkeypatch.setattr(backups, "Arrivals", Elsewhere)
    monkeypatch.setattr(backups.Backups, "_missing", note)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0, task=Late)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    check_end(fellows, job, (0, 1))
    assert missing.wait(5.0)
    assert told[0].startswith("the member that this one backs up: a member cannot be reached")
