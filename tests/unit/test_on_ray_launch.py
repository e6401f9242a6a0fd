"""From reports of failure to what the caller gets; no Ray runs here."""

from __future__ import annotations

from pathlib import Path

from raycloud import errors
from raycloud.commands import Finish
from raycloud.events import MemberFailed, MemberLost
from raycloud.on_ray.launch import failure_of


def test_a_member_s_error_comes_back_as_its_own_kind() -> None:
    failed = MemberFailed(member=1, error="DataError", message="no rows")
    error = failure_of(failed, Finish(status="failed"), Path("runs/a"))
    assert type(error) is errors.DataError
    assert error.message == "member 1: no rows"
    assert error.hint == "the run is kept in runs/a"


def test_what_control_says_of_a_lost_member_names_the_run() -> None:
    finish = Finish(status="failed", error="member 1 was lost: gone\n\nhint: resume it")
    error = failure_of(MemberLost(member=1, reason="gone"), finish, Path("runs/a"))
    assert type(error) is errors.MemberLostError
    assert error.hint == "resume it (run directory runs/a)"
