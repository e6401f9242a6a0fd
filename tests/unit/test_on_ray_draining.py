"""Ray's private word on draining nodes is there, and is read right."""

from __future__ import annotations

import inspect

import pytest

from raycloud.clock import VirtualClock
from raycloud.on_ray import draining
from raycloud.preemption import PreemptionNotice


def test_the_private_name_is_there() -> None:
    """Where this fails, another Ray is installed: see how its own ray.data asks, and do so."""
    from ray._private.state import GlobalState

    asked = getattr(GlobalState, "get_draining_nodes", None)
    assert asked is not None, "ray._private.state.GlobalState.get_draining_nodes is gone"
    assert list(inspect.signature(asked).parameters) == ["self"]


def test_moments_are_seconds_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"aa": 130_500, "bb": 0, "cc": 90_000}
    monkeypatch.setattr(draining.state, "get_draining_nodes", lambda: told)
    assert draining.draining(VirtualClock(100.0)) == {
        "aa": PreemptionNotice(reason=draining.REASON, deadline_s=30.5),
        "bb": PreemptionNotice(reason=draining.REASON, deadline_s=None),
        "cc": PreemptionNotice(reason=draining.REASON, deadline_s=0.0),
    }
