"""A cluster that is asked about itself: how long silence is borne, and whose fault a failure is."""

from __future__ import annotations

import tempfile
from typing import Any, NoReturn

import pytest
import ray

from raycloud.clock import VirtualClock
from raycloud.errors import MachineError
from raycloud.on_ray.survey import PATIENCE_S, _told, all_got, checkup


class Answers:
    """Stands for Ray: calls are texts, of which those in `silent` never answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *silent: str) -> None:
        self.clock, self._silent = VirtualClock(), silent
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> Any:
        assert num_returns == len(calls)
        ready = [one for one in calls if one not in self._silent]
        self.clock.advance(timeout if len(ready) < num_returns else 0.0)
        return ready, [one for one in calls if one in self._silent]

    def get(self, one: str, *, timeout: float) -> str:
        if one in self._silent:
            self.clock.advance(timeout)
            raise ray.exceptions.GetTimeoutError("Get timed out")
        if one == "broken":
            raise OSError("no such node")
        return one.upper()


def test_many_silent_nodes_cost_as_much_time_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "x", "y", "z")
    found = all_got(["x", "a", "y", "broken", "z", "b"])
    assert answers.clock.monotonic_s() == PATIENCE_S
    assert [one for one in found if isinstance(one, str)] == ["A", "B"]
    assert [type(one).__name__ for one in found if isinstance(one, Exception)] == [
        "SilentError", "SilentError", "OSError", "SilentError",
    ]  # fmt: skip
    assert _told(found[0]) == f"no answer within {PATIENCE_S:g} s"


def test_a_full_disk_here_is_no_finding_about_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: Any) -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "TemporaryFile", none)
    with pytest.raises(MachineError, match="No usable temporary directory") as raised:
        checkup("127.0.0.1:9", links=False, clock=VirtualClock())
    assert "TMPDIR" in raised.value.hint
