"""Whom a keeper obeys, and when it is alone; how a driver knows whether it is obeyed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import MachineError
from raycloud.on_ray import crew, tenure
from raycloud.on_ray.crew import Crew
from raycloud.on_ray.keeper import ANSWER_S, LEASE_S, FollowedError, Reign
from raycloud.on_ray.ray_cluster import RayCluster
from raycloud.on_ray.tenure import Tenure


def test_one_driver_at_a_time():
    clock = VirtualClock()
    reign = Reign(clock, 120.0)
    assert reign.claim("") == 1
    clock.advance(LEASE_S - 1.0)
    assert reign.hear(1)
    assert reign.claim("") is None
    clock.advance(LEASE_S - 1.0)
    assert reign.claim("") is None
    clock.advance(1.0)
    assert reign.claim("") == 2
    assert not reign.hear(1)
    assert reign.hear(2)


def test_who_holds_the_lock_that_the_last_one_held_need_not_wait():
    reign = Reign(VirtualClock(), 120.0)
    assert reign.claim("disk:7") == 1
    assert reign.claim("disk:8") is None  # of a copy of the run
    assert reign.claim("") is None
    assert reign.claim("disk:7") == 2


def test_alone_once_no_driver_speaks():
    clock = VirtualClock()
    reign = Reign(clock, 30.0)
    reign.claim("")
    clock.advance(29.0)
    assert reign.hear(1)
    clock.advance(29.0)
    assert not reign.end_if_alone()
    reign.hear(0)  # of one that is not obeyed
    clock.advance(1.0)
    assert reign.end_if_alone()


def test_alone_if_nobody_ever_comes():
    clock = VirtualClock()
    reign = Reign(clock, 30.0)
    clock.advance(30.0)
    assert reign.end_if_alone()


def test_whose_call_is_carried_out_is_heard_meanwhile():
    clock = VirtualClock()
    reign = Reign(clock, 10.0)
    reign.claim("")
    with reign.hearing(1) as obeyed:
        assert obeyed
        clock.advance(25.0)
        assert not reign.end_if_alone()
        assert reign.claim("") is None
    clock.advance(9.0)
    assert not reign.end_if_alone()
    clock.advance(1.0)
    assert reign.end_if_alone()


def test_a_call_without_end_is_heard_as_long_as_a_driver_waits_for_it():
    clock = VirtualClock()
    reign = Reign(clock, 10.0)
    reign.claim("")
    with reign.hearing(1):
        clock.advance(ANSWER_S + 9.0)
        assert not reign.end_if_alone()
        clock.advance(1.0)
        assert reign.end_if_alone()
    assert reign.end_if_alone()


def test_a_call_of_one_that_is_not_obeyed_is_not_heard():
    clock = VirtualClock()
    reign = Reign(clock, 10.0)
    reign.claim("")
    with reign.hearing(2) as obeyed:
        assert not obeyed
        clock.advance(10.0)
        assert reign.end_if_alone()


def test_nobody_claims_what_is_about_to_end():
    clock = VirtualClock()
    reign = Reign(clock, 10.0)
    assert reign.claim("disk:7") == 1
    clock.advance(10.0)
    assert reign.end_if_alone()
    assert reign.claim("disk:7") is None
    assert reign.hear(1)  # its driver is told by its end
    assert reign.end_if_alone()


@pytest.fixture
def reign(monkeypatch: pytest.MonkeyPatch) -> Reign:
    """What a keeper would say, without a Ray between."""
    monkeypatch.setattr(tenure.ray, "get", lambda call, timeout: call())
    return Reign(VirtualClock(), 120.0)


def remote(method: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=lambda *told: lambda: method(*told))


@pytest.fixture
def held(reign: Reign) -> Iterator[Tenure]:
    """The first driver's, which has stood still since: no beat of it has come."""
    actor = SimpleNamespace(hear=remote(reign.hear), call=remote(lambda *_: (True, None)))
    assert reign.claim("") == 1
    one = Tenure(actor, 1, reign._clock)
    yield one
    one._over.set()
    one._beats.join()


def test_a_driver_that_wakes_up_late_asks_before_it_goes_on(held: Tenure, reign: Reign):
    held.check()
    reign._clock.advance(LEASE_S)
    assert reign.claim("") == 2
    with pytest.raises(FollowedError, match="another process has taken this run over"):
        held.check()


def test_one_that_was_heard_lately_need_not_ask(held: Tenure, reign: Reign):
    reign._clock.advance(LEASE_S / 2)
    held._actor.hear.remote = None
    held.check()
    reign._clock.advance(LEASE_S / 2)
    with pytest.raises(TypeError):  # it asks
        held.check()


def test_one_that_is_still_obeyed_goes_on(held: Tenure, reign: Reign):
    reign._clock.advance(3 * LEASE_S)
    held.check()
    assert reign.claim("") is None


def test_where_the_keeper_is_gone_a_driver_says_so(held: Tenure, reign: Reign):
    def gone() -> None:
        raise tenure.GetTimeoutError

    held._actor.hear.remote = lambda _: gone
    reign._clock.advance(LEASE_S)
    with pytest.raises(MachineError, match="the process that holds the run's workers is gone"):
        held.check()


def test_what_came_from_members_is_not_written_before_it_is_known_who_is_obeyed():
    class Followed:
        def check(self) -> None:
            raise FollowedError("another one", hint="")

    cluster, asked = object.__new__(RayCluster), []
    cluster._keeper, cluster._untold, cluster._written = Followed(), [], dict
    cluster._fleet = SimpleNamespace(poll=lambda _, written: asked.append("poll") or ())
    with pytest.raises(FollowedError):
        cluster.hear(0.0)
    assert asked == ["poll"]


def test_collators_that_find_no_place_are_waited_for_together(monkeypatch: pytest.MonkeyPatch):
    numbers, removed = itertools.count(), []

    class Group:
        def __init__(self, bundles: Any) -> None:
            self.number = next(numbers)

        def wait(self, seconds: float) -> bool:
            threading.Event().wait(seconds)
            return False

    monkeypatch.setattr(crew, "placement_group", Group)
    monkeypatch.setattr(crew, "remove_placement_group", lambda group: removed.append(group.number))
    monkeypatch.setattr(crew, "placement_group_table", lambda _: {"state": "PENDING"})
    began_s = time.monotonic()
    assert Crew(SystemClock()).start(5, "p", None) == ()
    assert removed == [*range(5)]
    assert time.monotonic() - began_s < 2.0


def test_a_start_on_an_embedded_ray_loads_no_code_of_takeover() -> None:
    """What a driver is put together from does not; what it is held by there is a plain keeper."""
    asked = (
        "import sys; from raycloud.clock import SystemClock; from raycloud.on_ray import driver; "
        "from types import SimpleNamespace; "
        "session = SimpleNamespace(clock=SystemClock()); "
        "held = driver._held(session, None, outlives=False); "
        "print(type(held.__enter__()[0]).__name__, sorted(m for m in sys.modules "
        "if m in ('raycloud.on_ray.takeover', 'raycloud.on_ray.tenure')))"
    )
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True)
    assert told.stdout.decode() == "Keeper []\n"
