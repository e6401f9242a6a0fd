"""Whom a pool obeys, and when it is an orphan; how a driver knows whether it is obeyed."""

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
from raycloud.on_ray import failover, pool
from raycloud.on_ray.cluster import RayCluster
from raycloud.on_ray.failover import ANSWER_S, LEASE_S, RemotePool, Terms
from raycloud.on_ray.pool import ActorPool, SupersededError


def test_one_driver_at_a_time():
    clock = VirtualClock()
    terms = Terms(clock, 120.0)
    assert terms.claim("") == 1
    clock.advance(LEASE_S - 1.0)
    assert terms.heartbeat(1)
    assert terms.claim("") is None
    clock.advance(LEASE_S - 1.0)
    assert terms.claim("") is None
    clock.advance(1.0)
    assert terms.claim("") == 2
    assert not terms.heartbeat(1)
    assert terms.heartbeat(2)


def test_who_holds_the_lock_that_the_last_one_held_need_not_wait():
    terms = Terms(VirtualClock(), 120.0)
    assert terms.claim("disk:7") == 1
    assert terms.claim("disk:8") is None  # of a copy of the run
    assert terms.claim("") is None
    assert terms.claim("disk:7") == 2


def test_alone_once_no_driver_speaks():
    clock = VirtualClock()
    terms = Terms(clock, 30.0)
    terms.claim("")
    clock.advance(29.0)
    assert terms.heartbeat(1)
    clock.advance(29.0)
    assert not terms.end_if_orphan()
    terms.heartbeat(0)  # of one that is not obeyed
    clock.advance(1.0)
    assert terms.end_if_orphan()


def test_whose_call_is_carried_out_is_heard_meanwhile():
    clock = VirtualClock()
    terms = Terms(clock, 10.0)
    terms.claim("")
    with terms.calling(1) as obeyed:
        assert obeyed
        clock.advance(25.0)
        assert not terms.end_if_orphan()
        assert terms.claim("") is None
    clock.advance(9.0)
    assert not terms.end_if_orphan()
    clock.advance(1.0)
    assert terms.end_if_orphan()


def test_a_call_without_end_is_heard_as_long_as_a_driver_waits_for_it():
    clock = VirtualClock()
    terms = Terms(clock, 10.0)
    terms.claim("")
    with terms.calling(1):
        clock.advance(ANSWER_S + 9.0)
        assert not terms.end_if_orphan()
        clock.advance(1.0)
        assert terms.end_if_orphan()
    assert terms.end_if_orphan()


def test_a_call_of_one_that_is_not_obeyed_is_not_heard():
    clock = VirtualClock()
    terms = Terms(clock, 10.0)
    terms.claim("")
    with terms.calling(2) as obeyed:
        assert not obeyed
        clock.advance(10.0)
        assert terms.end_if_orphan()


def test_nobody_claims_what_is_about_to_end():
    clock = VirtualClock()
    terms = Terms(clock, 10.0)
    assert terms.claim("disk:7") == 1
    clock.advance(10.0)
    assert terms.end_if_orphan()
    assert terms.claim("disk:7") is None
    assert terms.heartbeat(1)  # its driver is told by its end
    assert terms.end_if_orphan()


@pytest.fixture
def terms(monkeypatch: pytest.MonkeyPatch) -> Terms:
    """What a pool would say, without a Ray between."""
    monkeypatch.setattr(failover.ray, "get", lambda call, timeout: call())
    return Terms(VirtualClock(), 120.0)


def remote(method: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=lambda *told: lambda: method(*told))


@pytest.fixture
def held(terms: Terms) -> Iterator[RemotePool]:
    """The first driver's, which has stood still since: no beat of it has come."""
    actor = SimpleNamespace(heartbeat=remote(terms.heartbeat), call=remote(lambda *_: (True, None)))
    assert terms.claim("") == 1
    one = RemotePool(actor, 1, terms._clock)
    yield one
    one._over.set()
    one._beats.join()


def test_a_driver_that_wakes_up_late_asks_before_it_goes_on(held: RemotePool, terms: Terms):
    held.check()
    terms._clock.advance(LEASE_S)
    assert terms.claim("") == 2
    with pytest.raises(SupersededError, match="another process has taken this run over"):
        held.check()


def test_one_that_was_heard_lately_need_not_ask(held: RemotePool, terms: Terms):
    terms._clock.advance(LEASE_S / 2)
    held._actor.heartbeat.remote = None
    held.check()
    terms._clock.advance(LEASE_S / 2)
    with pytest.raises(TypeError):  # it asks
        held.check()


def test_one_that_is_still_obeyed_goes_on(held: RemotePool, terms: Terms):
    terms._clock.advance(3 * LEASE_S)
    held.check()
    assert terms.claim("") is None


def test_where_the_pool_is_gone_a_driver_says_so(held: RemotePool, terms: Terms):
    def gone() -> None:
        raise failover.GetTimeoutError

    held._actor.heartbeat.remote = lambda _: gone
    terms._clock.advance(LEASE_S)
    with pytest.raises(MachineError, match="the process that holds the run's workers is gone"):
        held.check()


def test_what_came_from_members_is_not_written_before_it_is_known_who_is_obeyed():
    class Followed:
        def check(self) -> None:
            raise SupersededError("another one", hint="")

    cluster, asked = object.__new__(RayCluster), []
    cluster._pool, cluster._untold, cluster._written = Followed(), [], dict
    cluster._fleet = SimpleNamespace(poll=lambda _, written: asked.append("poll") or ())
    with pytest.raises(SupersededError):
        cluster.hear(0.0)
    assert asked == ["poll"]


def test_collators_that_find_no_place_are_waited_for_together(monkeypatch: pytest.MonkeyPatch):
    numbers, removed = itertools.count(), []
    labels: list[Any] = []

    class Group:
        def __init__(self, bundles: Any, **told: Any) -> None:
            self.number = next(numbers)
            labels.append(told["bundle_label_selector"])

        def wait(self, seconds: float) -> bool:
            threading.Event().wait(seconds)
            return False

    monkeypatch.setattr(pool, "placement_group", Group)
    monkeypatch.setattr(pool, "remove_placement_group", lambda group: removed.append(group.number))
    monkeypatch.setattr(pool, "placement_group_table", lambda _: {"state": "PENDING"})
    began_s = time.monotonic()
    assert ActorPool(SystemClock()).start_collators(("", "a", "b", "b", ""), "p", [None]) == ()
    assert removed == [*range(5)]
    assert labels == [None, *([{"ray.io/node-id": node}] for node in "abb"), None]
    assert time.monotonic() - began_s < 2.0


def test_who_has_servers_is_not_taken_over() -> None:
    """They have ended with the driver, and members would look for them without end."""
    session: Any = SimpleNamespace(job=SimpleNamespace(servers=SimpleNamespace(shards=1)))
    nobody: Any = None
    found, why = failover._failover(session, nobody, nobody)
    assert (found, why) == (None, "the servers end with their driver")


def test_a_start_on_an_embedded_ray_loads_no_code_of_failover() -> None:
    """What a driver is put together from does not; what it is held by there is a plain pool."""
    asked = (
        "import sys; from raycloud.clock import SystemClock; from raycloud.on_ray import launch; "
        "from types import SimpleNamespace; "
        "session = SimpleNamespace(clock=SystemClock(), seats=None); "
        "held = launch._pool(session, None, outlives=False); "
        "print(type(held.__enter__()[0]).__name__, sorted(m for m in sys.modules "
        "if m == 'raycloud.on_ray.failover'))"
    )
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True)
    assert told.stdout.decode() == "ActorPool []\n"


def test_what_outlives_the_driver_loads_nothing_that_computes() -> None:
    """Its start holds up that of all members, and torch alone takes seconds."""
    asked = (
        "import sys; from raycloud.on_ray import actors, failover, pool, seats; "
        "print([one for one in ('torch', 'pyarrow') if one in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True)
    assert told.stdout.decode() == "[]\n"
