"""Where roles of nodes are not chosen, the run goes on without collators, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import SystemClock
from raycloud.events import Noticed
from raycloud.on_ray.roles import with_roles
from raycloud.on_ray.session import Session
from raycloud.spec import Job, RunDirectory
from tests.lockstep import NetTask


def session(folder: Path, *, collators: Any = "auto", servers: int = 0, **more: Any) -> Session:
    job = Job(
        task=NetTask,
        steps=1,
        global_batch=4,
        data={"collators": collators},  # type: ignore[arg-type]
        servers={"shards": servers},  # type: ignore[arg-type]
    )
    fixed: dict[str, Any] = {
        "job": job,
        "asked": job,
        "task": NetTask,
        "code": None,
        "directory": RunDirectory(folder),
        "resume": False,
        "clock": SystemClock(),
        "began_s": 0.0,
        "observer": lambda _: None,
        "stop": None,
    }
    return Session(**fixed, **more)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"only_steps": 2}, "it is only tried out"),
        ({"seats": object()}, "its places are those of several runs"),
        ({"servers": 1}, "servers have a part of the nodes"),
    ],
    ids=["tried", "seats", "servers"],
)
def test_roles_are_not_chosen_everywhere(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    found, (told,) = with_roles(session(tmp_path, **more))
    assert isinstance(told, Noticed)
    assert told.detail == {"why": why}
    assert found.roles is None
    assert found.job.data.collators == 0
    assert found.asked.data.collators == "auto"


def test_a_number_of_collators_is_taken_as_it_is(tmp_path: Path) -> None:
    asked = session(tmp_path, collators=3)
    assert with_roles(asked) == (asked, ())
