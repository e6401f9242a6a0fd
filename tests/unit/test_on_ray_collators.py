"""Collators that cannot be trusted with a step are left out; what nobody wants, nobody makes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import TaskCancelledError

from raycloud.errors import DataError
from raycloud.on_ray import collators
from raycloud.on_ray.collators import Collator, Delivery, RayCollators, Unable
from raycloud.order import MicroBatch, Order
from raycloud.spec import ElasticSection
from raycloud.step.collate import Collate
from tests.unit.test_step_feed import Identity

ORDER = Order(samples=8, seed=0, shuffle=False)
GREW = {1: 12, 2: 16}  # samples by version; version v counts from epoch v on
FIRST = (MicroBatch(index=0, epoch=0, start=0, stop=4),)
LATER = (MicroBatch(index=0, epoch=1, start=8, stop=12),)


class Provider:
    """Data that grows, as long as its version is not in `fails`."""

    def __init__(self, fails: set[int]) -> None:
        self.fails = fails

    def provide(self, task: Any, splits: Any) -> Any:
        self._refuse(0)
        return SimpleNamespace(train=range(8))

    def grown(self, version: int) -> Any:
        self._refuse(version)
        return range(GREW[version])

    def notices(self) -> list[Any]:
        return []

    def _refuse(self, version: int) -> None:
        if version in self.fails:
            raise DataError(f"version {version} is gone")


def collator(*fails: int) -> Collator:
    job = SimpleNamespace(settings={}, seed=0, elastic=ElasticSection())
    config: Any = SimpleNamespace(task=Identity, job=job)
    return Collator(config, Provider(set(fails)))


def begun(*fails: int) -> Collator:
    made = collator(*fails)
    made.begin(ORDER)
    return made


def test_a_collator_tells_why_it_could_not_begin_and_may_begin_again() -> None:
    one = collator(0)
    one.begin(ORDER)
    found = one.passes(FIRST, 1, 0, joins=False)
    assert isinstance(found, Unable)
    assert "DataError: version 0 is gone" in found.why
    one._provider.fails.clear()
    one.begin(ORDER)
    assert isinstance(one.passes(FIRST, 1, 0, joins=False), Delivery)


def test_a_collator_makes_no_passes_of_data_that_it_was_not_told_of() -> None:
    one = begun()
    assert "version 1" in why(one.passes(LATER, 1, 1, joins=False))
    one.extend(0, 1, 1, None)
    one.extend(0, 1, 1, None)  # each member says so
    for version in (0, 1):  # a member that is not there yet is served too
        assert isinstance(one.passes(LATER, 1, version, joins=False), Delivery)


def test_a_growth_that_failed_is_told_and_tried_again_for_the_next_member() -> None:
    one = begun(1)
    one.extend(0, 1, 1, None)
    assert "DataError: version 1 is gone" in why(one.passes(LATER, 1, 1, joins=False))
    one._provider.fails.clear()
    one.extend(0, 1, 1, None)
    assert isinstance(one.passes(LATER, 1, 1, joins=False), Delivery)


def test_a_later_growth_does_not_make_up_for_one_that_was_missed() -> None:
    one = begun(1)
    one.extend(0, 1, 1, None)
    one.extend(1, 2, 2, None)
    assert "missed version 1" in why(one.passes(LATER, 1, 2, joins=False))


class Calls:
    """Ray, with actors of this process: a call is what it returned, or its error."""

    def __init__(self, actors: dict[str, Collator]) -> None:
        self.get_actor = {name: Remote(one) for name, one in actors.items()}.__getitem__

    def get(self, call: Any) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    def wait(self, calls: list[Any], timeout: float) -> Any:
        return calls, []

    def cancel(self, call: Any) -> None:
        """It has come back before."""


class Remote:
    """Methods with `.remote`."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.one, name))


class Cancels:
    """A collator whose calls are all cancelled."""

    def begin(self, order: Order) -> None:
        """Nothing to build."""

    def passes(self, *asked: Any, joins: bool) -> Exception:
        return TaskCancelledError()


Member = Callable[..., tuple[RayCollators, list[dict[str, Any]]]]


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    """Makes a member's side, and the notices that it gets."""

    def made(**actors: Any) -> tuple[RayCollators, list[dict[str, Any]]]:
        monkeypatch.setattr(collators, "ray", Calls(actors))
        notices: list[dict[str, Any]] = []
        own = Collate(Identity(), range(8), ORDER, pinned=False)
        crew = RayCollators(
            list(actors),
            ORDER,
            own,
            lambda version: range(GREW[version]),  # type: ignore[arg-type,return-value]
            lambda what, **detail: notices.append({"what": what, **detail}),
            first=0,
        )
        return crew, notices

    return made


def test_a_member_makes_what_a_collator_behind_does_not_and_asks_it_no_more(member: Member) -> None:
    behind = collator(1)
    crew, notices = member(behind=behind)
    before = crew.submit(FIRST, 1).result()
    assert before[0].batch.tolist() == [0, 1, 2, 3]
    assert notices == []
    crew.extend(1, 1, None)
    asked = [crew.submit(LATER, 1) for _ in range(2)]
    for one in asked:
        assert one.result()[0].batch.tolist() == [8, 9, 10, 11]
    (notice,) = notices  # once
    assert notice["what"] == "a collator is not used any more"
    assert "version 1 is gone" in notice["why"]
    assert crew.submit(LATER, 1).call is None


def test_a_member_names_why_a_collator_could_not_begin(member: Member) -> None:
    crew, notices = member(broken=collator(0))
    assert crew.submit(FIRST, 1).result()[0].batch.tolist() == [0, 1, 2, 3]
    assert "version 0 is gone" in notices[0]["why"]


def test_what_is_cancelled_is_neither_made_nor_taken_for_a_loss(member: Member) -> None:
    crew, notices = member(one=Cancels())
    asked = crew.submit(FIRST, 1)
    asked.cancel()
    with pytest.raises(CancelledError):
        asked.result()
    assert notices == []
    assert crew.submit(FIRST, 1).result()  # not cancelled by us: lost
    assert [one["what"] for one in notices] == ["a collator was lost"]


def test_two_that_ask_the_same_are_two(member: Member) -> None:
    crew, _ = member()
    assert crew.submit(FIRST, 1) != crew.submit(FIRST, 1)
    assert isinstance(TaskCancelledError(), ray.exceptions.RayError)


def why(found: Any) -> str:
    assert isinstance(found, Unable)
    return found.why
