"""Places of members that have died: had by others while they stand, else given back."""

from __future__ import annotations

from typing import Any

import pytest

from raycloud.clock import VirtualClock
from raycloud.on_ray import pool
from raycloud.on_ray.pool import ActorPool, Seat, Shape, Vacancies


class Holding(ActorPool):
    """A pool in which each member has a place that is named as it is."""

    def __init__(self, *members: int) -> None:
        super().__init__(VirtualClock())
        shape = Shape.of({"CPU": 1}, {})
        self._seats = {member: Seat(f"place-{member}", shape) for member in members}

    @property
    def places(self) -> dict[int, str]:
        return {member: seat.group for member, seat in self._seats.items()}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray says of each place, and which nodes it drains."""
    said: dict[str, Any] = {"state": "CREATED", "drained": {}}
    nodes = {0: "a"}

    def table(_: Any) -> dict[str, Any]:
        return {"state": said["state"], "bundles_to_node_id": nodes}

    monkeypatch.setattr(pool, "placement_group_table", table)
    monkeypatch.setattr(pool, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(pool, "draining", lambda _: said["drained"])
    return said


def kept(holding: Any) -> Vacancies:
    return Vacancies(holding, VirtualClock())


@pytest.mark.usefixtures("told")
def test_another_has_the_place_of_who_died() -> None:
    holding = Holding(0, 1)
    found = kept(holding)
    found.add(1)
    assert found.take(1, 5)
    assert holding.places == {0: "place-0", 5: "place-1"}
    found.give_back()
    assert holding.places == {0: "place-0", 5: "place-1"}
    assert not found.take(1, 6)  # it has one place


@pytest.mark.usefixtures("told")
def test_what_nobody_takes_is_given_back() -> None:
    holding = Holding(0, 1)
    found = kept(holding)
    found.add(1)
    assert 1 in found
    found.give_back()
    assert holding.places == {0: "place-0"}
    assert 1 not in found
    assert not found.take(1, 5)


@pytest.mark.usefixtures("told")
def test_who_is_not_known_to_have_died_keeps_its_place() -> None:
    holding = Holding(0, 1)
    assert not kept(holding).take(1, 5)
    assert holding.places == {0: "place-0", 1: "place-1"}


@pytest.mark.parametrize(
    "said",
    [{"state": "RESCHEDULING"}, {"state": "REMOVED"}, {"drained": {"a": None}}],
    ids=["its node is dead", "removed", "its node is drained"],
)
def test_a_place_that_does_not_stand_is_given_back(
    said: dict[str, Any], told: dict[str, Any]
) -> None:
    told |= said
    holding = Holding(0, 1)
    found = kept(holding)
    found.add(1)
    assert not found.take(1, 5)
    assert holding.places == {0: "place-0"}
