"""A member that cannot begin says why, whose fault it is, and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.events import Event, MemberFailed, MemberReady
from raycloud.worker.member import Member, MemberConfig
from tests.live_tasks import Faulty
from tests.lockstep import NetTask, job

POLL_S = 30.0


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here it shares a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fault": "unreadable"}, "DataError", "could not be read: [Errno 2] No such file"),
        ({"fault": "empty"}, "DataError", "the data set has no training samples"),
        ({"fault": "data"}, "TaskError", "Task.data raised KeyError"),
        ({"fault": "model"}, "TaskError", "Task.model raised ValueError: no such width"),
        ({"fault": "batch"}, "TaskError", "Task.batch raised IndexError: sample 7 has no label"),
        ({"fault": "loss"}, "TaskError", "Task.loss raised RuntimeError: the shapes do not"),
        ({"unknown": 1}, "TaskError", "could not be made from settings ['unknown']"),
        ({"fault": "constructor"}, "TaskError", "settings ['fault']: ValueError: width must be"),
        ({"fault": "draws"}, "TaskError", "drew from a global random generator"),
    ],
    ids=[
        "unreadable",
        "empty",
        "data",
        "model",
        "batch",
        "loss",
        "settings",
        "constructor",
        "draws",
    ],
)
def test_member_that_cannot_begin(
    tmp_path: Path, settings: dict[str, Any], error: str, message: str
) -> None:
    failure = _last(job(task=Faulty, settings=settings), tmp_path)
    assert isinstance(failure, MemberFailed)
    assert failure.error == error
    assert message in failure.message
    assert failure.hint or 'live_tasks.py", line' in failure.message


def test_too_little_data_for_a_whole_batch(tmp_path: Path) -> None:
    asked = job(task=Faulty, settings={"samples": 9}, drop_last=True)
    failure = _last(asked, tmp_path)
    assert isinstance(failure, MemberFailed)
    assert failure.error == "DataError"
    assert "drop_last leaves no step: 9 samples" in failure.message
    assert "lower global_batch" in failure.hint


def _last(asked: Any, folder: Path) -> Event:
    events = Member(_config(asked, folder)).poll(POLL_S)
    assert events
    return events[-1]


def _config(asked: Any, folder: Path, **more: Any) -> MemberConfig:
    return MemberConfig(
        member=0, node="", address="", job=asked, task=Faulty, checkpoints=str(folder), **more
    )


@pytest.mark.parametrize("shares", ["auto", "equal"])
def test_who_joins_computes_a_share_before_it_is_ready(tmp_path: Path, shares: str) -> None:
    sizes: list[int] = []

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.append(len(batch[1]))
            return super().loss(model, batch)

    elastic = {"min_workers": 1, "max_workers": 2, "shares": shares}
    asked = job(task=Sized, settings={"dropout": 0.0, "branch": False}, elastic=elastic)
    config = replace(_config(asked, tmp_path, joins=True), task=Sized)
    [told] = Member(config).poll(POLL_S)
    assert isinstance(told, MemberReady)
    assert sizes == [2, 2, 8]


@pytest.mark.parametrize("fault", ["", "loss"])
def test_who_takes_a_place_is_as_fast_as_is_known_and_shows_its_errors(
    tmp_path: Path, fault: str
) -> None:
    asked = job(task=Faulty, settings={"fault": fault})
    config = _config(asked, tmp_path, joins=True, speed=(0.5, 0.25))
    [told] = Member(config).poll(POLL_S)
    if fault:
        assert isinstance(told, MemberFailed)
        assert "Task.loss raised RuntimeError" in told.message
    else:
        assert isinstance(told, MemberReady)
        assert (told.fixed_s, told.micro_batch_s) == (0.5, 0.25)
