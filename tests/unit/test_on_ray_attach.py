"""Attaching to a Ray: one that does not start is the machine's fault; draining nodes are seen."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from raycloud.clock import VirtualClock
from raycloud.errors import MachineError
from raycloud.on_ray import attach
from raycloud.on_ray.attach import attached
from raycloud.preemption import PreemptionNotice
from tests.lockstep import job


def test_a_ray_that_takes_too_long_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception there."""
    import ray

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray

    monkeypatch.setattr(ray, "init", late)
    with (
        patch.dict(os.environ),
        pytest.raises(MachineError, match="not be started: The current node timed out"),
        attached(job(), None),
    ):
        pass


def test_a_home_that_nobody_knows_does_not_leave_ray_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    ended: list[bool] = []

    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(Path, "expanduser", unknown)
    with patch.dict(os.environ), attached(job(), None) as own:
        assert own
        assert not ended
    assert ended == [True]


def test_other_faults_are_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def wrong(**_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(ray, "init", wrong)
    with patch.dict(os.environ), pytest.raises(KeyError), attached(job(), None):
        pass


def test_a_folder_too_long_for_sockets_is_refused_before_ray_starts() -> None:
    for name, other in (("RAY_TMPDIR", "TMPDIR"), ("TMPDIR", "RAY_TMPDIR")):
        with patch.dict(os.environ, {name: "/tmp/" + 95 * "x"}):
            os.environ.pop(other, None)
            with (
                pytest.raises(MachineError, match=f"^{name} = .* is too long") as caught,
                attached(job(), None),
            ):
                pass
            assert "at most 39 bytes" in caught.value.hint


@pytest.mark.parametrize(("variable", "hint"), [(True, "unset RAY_ADDRESS"), (False, "--address")])
def test_a_cluster_that_does_not_answer_is_named_as_it_was_given(variable: bool, hint: str) -> None:
    address = "127.0.0.1:9"
    with (
        patch.dict(os.environ, {"RAY_ADDRESS": address if variable else "127.0.0.1:8"}),
        pytest.raises(MachineError, match="no Ray cluster answers") as caught,
    ):
        attached(job(), address).__enter__()
    assert hint in caught.value.hint


def test_the_private_name_is_there() -> None:
    """Where this fails, another Ray is installed: see how its own ray.data asks, and do so."""
    from ray._private.state import GlobalState

    asked = getattr(GlobalState, "get_draining_nodes", None)
    assert asked is not None, "ray._private.state.GlobalState.get_draining_nodes is gone"
    assert list(inspect.signature(asked).parameters) == ["self"]


def test_moments_are_seconds_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"aa": 130_500, "bb": 0, "cc": 90_000}
    from ray._private.state import state

    monkeypatch.setattr(state, "get_draining_nodes", lambda: told)
    assert attach.draining(VirtualClock(100.0)) == {
        "aa": PreemptionNotice(reason=attach.REASON, deadline_s=30.5),
        "bb": PreemptionNotice(reason=attach.REASON, deadline_s=None),
        "cc": PreemptionNotice(reason=attach.REASON, deadline_s=0.0),
    }
