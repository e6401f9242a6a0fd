"""Collators over real sockets: the same passes, whoever makes them, and whoever is lost."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raycloud.clock import Clock, SystemClock, VirtualClock
from raycloud.errors import DataError, TaskError
from raycloud.net.messages import hear, tell
from raycloud.net.stream import Place, listen, welcome
from raycloud.order import Layout, MicroBatch, Order, Position, Steps
from raycloud.spec import ElasticSection
from raycloud.step.collate import Collate, Making
from raycloud.step.feed import Feed
from raycloud.task import Splits
from raycloud.worker.collator import (
    Collator,
    CollatorServer,
    UnableError,
    order_of_record,
    order_record,
    training_fingerprint,
)
from raycloud.worker.collators import RemoteCollators
from tests.unit.test_step_feed import Identity

PATIENCE_S = 10.0
SAMPLES = 8
ORDER = Order(samples=SAMPLES, seed=0, shuffle=False)
GREW = {1: 12, 2: 16}  # samples by version; version v counts from epoch v on
FIRST = (MicroBatch(index=0, epoch=0, start=0, stop=4),)
BOTH = (*FIRST, MicroBatch(index=3, epoch=0, start=4, stop=8))
LATER = (MicroBatch(index=0, epoch=1, start=8, stop=12),)


class Rows:
    """Rows of blocks, which are their ids."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def gather(self, ids: Any) -> list[int]:
        return list(ids.tolist())


class Blocks:
    """A provider of data that grows, as long as its version is not in `fails`."""

    def __init__(self, fails: set[int]) -> None:
        self.fails = fails

    def provide(self, task: Any, splits: Any) -> Any:
        self._refuse(0)
        return SimpleNamespace(train=Rows(SAMPLES))

    def grown(self, version: int) -> Any:
        self._refuse(version)
        return Rows(GREW[version])

    def notices(self) -> list[Any]:
        return []

    def _refuse(self, version: int) -> None:
        if version in self.fails:
            raise DataError(f"version {version} is gone")


class Draws(Identity):
    """Adds what it draws, and holds back batches until `gate` is open."""

    gate = threading.Event()
    begun = threading.Event()

    def data(self, path: str | None) -> Splits:
        return Splits(train=range(SAMPLES))  # type: ignore[arg-type]

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        assert rng is not None
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        noise = torch.from_numpy(rng.random(len(samples)))
        return {"x": torch.tensor(samples) + noise, "ids": [int(one) for one in samples]}


class Other(Draws):
    """Other samples of its own."""

    def data(self, path: str | None) -> Splits:
        return Splits(train=range(1, SAMPLES + 1))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _open() -> Iterator[None]:
    Draws.gate.set()
    Draws.begun.clear()
    yield
    Draws.gate.set()


def collator(*fails: int, task: Any = Identity) -> Collator:
    data = SimpleNamespace(path=None)
    job = SimpleNamespace(settings={}, seed=0, elastic=ElasticSection(), data=data)
    config: Any = SimpleNamespace(task=task, job=job)
    provider: Any = Blocks(set(fails))
    return Collator(config, provider)


def begin(order: Order = ORDER, version: int = 0, samples: int = SAMPLES) -> dict[str, Any]:
    told = {"order": order_record(order), "version": version, "samples": samples}
    return {**told, "blocks": True, "fingerprint": {}}


def begun(*fails: int) -> Collator:
    made = collator(*fails)
    made.begin(begin())
    return made


class Member:
    """A member's side, with the notices that it gets."""

    def __init__(
        self,
        places: dict[str, Place],
        collate: Collate,
        own: Any = None,
        clock: Clock | None = None,
    ) -> None:
        self.notices: list[dict[str, Any]] = []
        self.heard = threading.Event()

        def notice(what: str, **detail: Any) -> None:
            self.notices.append({"what": what, **detail})
            self.heard.set()

        fingerprint = {} if own is None else training_fingerprint(own)
        where = places.__getitem__
        self.collators = RemoteCollators(
            [*places], where, collate, fingerprint, notice, clock=clock
        )
        settled = self.collators.settled.wait(PATIENCE_S)
        assert settled, [(one.name, one.ready, one.stream) for one in self.collators._peers]

    def passes(self, micro_batches: tuple[MicroBatch, ...] = FIRST, fuse: int = 1) -> Any:
        return self.collators.submit(micro_batches, fuse).result()


@pytest.fixture
def served() -> Iterator[Callable[..., dict[str, Place]]]:
    """Collators by name, each behind a server of its own."""
    with contextlib.ExitStack() as over:

        def serve(**collators: Collator) -> dict[str, Place]:
            found = {}
            for name, one in collators.items():
                server = CollatorServer(one, "127.0.0.1")
                over.callback(server.close)
                SERVERS[name] = server
                found[name] = server.place
            return found

        yield serve


SERVERS: dict[str, CollatorServer] = {}


def own(task: Any = None, samples: Any = None) -> Collate:
    return Collate(task or Identity(), samples or Rows(SAMPLES), ORDER, pinned=False)


def same(left: Any, right: Any) -> bool:
    for one, other in zip(left, right, strict=True):
        told = [(x.micro_batches, x.weight, x.seed, x.rows) for x in (one, other)]
        if told[0] != told[1] or one.batch["ids"] != other.batch["ids"]:
            return False
        if not torch.equal(one.batch["x"], other.batch["x"]):
            return False
    return True


@pytest.mark.parametrize("fuse", [1, 2])
@pytest.mark.parametrize("joins", [False, True])
def test_passes_are_to_the_bit_those_that_the_member_makes(
    served: Any, fuse: int, joins: bool
) -> None:
    samples = range(SAMPLES)
    mine, theirs = own(Draws(), samples), own(Draws(), samples)
    mine.joins = theirs.joins = joins
    member = Member(served(a=collator(task=Draws), b=collator(task=Draws)), mine, samples)
    for _ in range(3):
        assert same(member.passes(BOTH, fuse), theirs.passes(BOTH, fuse))
    assert member.notices == []
    assert member.collators.left == 2


def test_an_order_arrives_as_it_is() -> None:
    layout = Layout(partitions=(0, 4, 8), lanes=2, run=2, window=1)
    grown = Layout(partitions=(0, 4, 8, 10, 12), lanes=2, run=2, window=1)
    order = Order(samples=8, seed=3, layout=layout).extended(2, 12, grown)
    again = order_of_record(order_record(order))
    for epoch in range(4):
        count = order.samples_in(epoch)
        assert again.ids(epoch, 0, count).tolist() == order.ids(epoch, 0, count).tolist()


def test_a_collator_tells_why_it_could_not_begin_and_may_begin_again() -> None:
    one = collator(0)
    with pytest.raises(UnableError, match="DataError: version 0 is gone"):
        one.begin(begin())
    one._provider.fails.clear()  # type: ignore[attr-defined]
    one.begin(begin())
    assert one.passes([[*FIRST]], 0, joins=False)[0].batch.tolist() == [0, 1, 2, 3]


def test_a_collator_makes_no_passes_of_data_that_it_was_not_told_of() -> None:
    one = begun()
    with pytest.raises(UnableError, match="version 1"):
        one.passes([[*LATER]], 1, joins=False)
    one.extend(0, 1, 1, None)
    one.extend(0, 1, 1, None)  # each member says so
    for version in (0, 1):  # a member that is not there yet is served too
        assert one.passes([[*LATER]], version, joins=False)[0].batch.tolist() == [8, 9, 10, 11]


def test_a_growth_that_failed_is_told_and_tried_again_for_the_next_member() -> None:
    one = begun(1)
    one.extend(0, 1, 1, None)
    with pytest.raises(UnableError, match="DataError: version 1 is gone"):
        one.passes([[*LATER]], 1, joins=False)
    one._provider.fails.clear()  # type: ignore[attr-defined]
    one.extend(0, 1, 1, None)
    assert one.passes([[*LATER]], 1, joins=False)


def test_a_later_growth_does_not_make_up_for_one_that_was_missed() -> None:
    one = begun(1)
    one.extend(0, 1, 1, None)
    one.extend(1, 2, 2, None)
    with pytest.raises(UnableError, match="missed version 1"):
        one.passes([[*LATER]], 2, joins=False)


def test_a_member_that_comes_after_a_growth_brings_the_collator_there() -> None:
    one = begun()
    one.begin(begin(ORDER.extended(1, 12, None), version=1, samples=12))
    assert one.passes([[*LATER]], 1, joins=False)[0].batch.tolist() == [8, 9, 10, 11]
    assert one.passes([[*FIRST]], 0, joins=False)[0].batch.tolist() == [0, 1, 2, 3]


def test_growth_is_told_before_what_is_asked_of_it(served: Any) -> None:
    mine = own()
    member = Member(served(a=collator()), mine)
    mine.extend(Rows(12), 1, None)  # type: ignore[arg-type]
    member.collators.extend(1, 1, None)
    assert member.passes(LATER)[0].batch.tolist() == [8, 9, 10, 11]
    assert member.notices == []


def test_a_member_makes_what_a_collator_cannot_and_asks_it_no_more(served: Any) -> None:
    mine = own()
    member = Member(served(behind=collator(1)), mine)
    mine.extend(Rows(12), 1, None)  # type: ignore[arg-type]
    member.collators.extend(1, 1, None)
    asked = [member.collators.submit(LATER, 1) for _ in range(2)]
    for one in asked:
        assert one.result()[0].batch.tolist() == [8, 9, 10, 11]
    (notice,) = member.notices  # once
    assert notice["what"] == "a collator is not used any more"
    assert "version 1 is gone" in notice["why"]
    assert member.collators.left == 0


def test_one_that_could_not_begin_is_named_and_the_others_are_asked(served: Any) -> None:
    member = Member(served(broken=collator(0), whole=collator()), own())
    assert member.heard.wait(PATIENCE_S)
    (notice,) = member.notices
    assert (notice["collator"], notice["left"]) == ("broken", 1)
    assert "version 0 is gone" in notice["why"]
    assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]


def test_other_samples_than_the_members_are_not_used(served: Any) -> None:
    samples = range(SAMPLES)
    member = Member(served(a=collator(task=Other)), own(Draws(), samples), samples)
    assert member.heard.wait(PATIENCE_S)
    assert member.notices[0]["why"] == "Task.data gives other training samples there"
    assert member.passes()[0].batch["ids"] == [0, 1, 2, 3]


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_lost_collator_was_asked_for_another_makes_or_the_member(
    served: Any, others: int
) -> None:
    samples = range(SAMPLES)
    names = ["a", "b"][: 1 + others]
    places = served(**{name: collator(task=Draws) for name in names})
    member = Member(places, own(Draws(), samples), samples)
    Draws.gate.clear()
    asked = [member.collators.submit(BOTH, 1) for _ in range(3)]
    assert Draws.begun.wait(PATIENCE_S)
    SERVERS["a"].close()
    assert member.heard.wait(PATIENCE_S)
    Draws.gate.set()
    whole = own(Draws(), samples).passes(BOTH, 1)
    assert all(same(one.result(), whole) for one in asked)
    (notice,) = member.notices
    assert (notice["what"], notice["left"]) == ("a collator was lost", others)


def test_one_that_is_not_there_is_lost_and_the_member_makes_its_own() -> None:
    class Nowhere(dict[str, Place]):
        def __missing__(self, name: str) -> Place:
            raise LookupError("ActorDiedError")

    places = Nowhere()
    member = Member.__new__(Member)
    member.notices, member.heard = [], threading.Event()

    def notice(what: str, **detail: Any) -> None:
        member.notices.append({"what": what, **detail})

    member.collators = RemoteCollators(["gone"], places.__getitem__, own(), {}, notice)
    assert member.collators.settled.wait(PATIENCE_S)
    assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]
    assert member.notices == [
        {"what": "a collator was lost", "collator": "gone", "left": 0, "why": "ActorDiedError"}
    ]


class Torn(Identity):
    """A batch that a collator cannot make; `here` can."""

    here = False

    def __init__(self) -> None:
        super().__init__()

    def data(self, path: str | None) -> Splits:
        return Splits(train=range(SAMPLES))  # type: ignore[arg-type]

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if not self.here:
            raise ValueError("no such image")
        return super().batch(samples, rng)


def test_an_error_of_the_task_comes_from_the_member_itself(served: Any) -> None:
    samples = range(SAMPLES)
    member = Member(served(a=collator(task=Torn)), own(Torn(), samples), samples)
    with pytest.raises(TaskError, match="no such image"):
        member.passes()
    assert member.collators.left == 1


def test_what_fails_there_alone_is_the_fault_of_that_machine(served: Any) -> None:
    samples, task = range(SAMPLES), Torn()
    task.here = True
    member = Member(served(a=collator(task=Torn)), own(task, samples), samples)
    assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]
    (notice,) = member.notices
    assert notice["what"] == "a collator failed where this worker did not"
    assert "no such image" in notice["why"]


def test_what_is_cancelled_is_neither_made_nor_taken_for_a_loss(served: Any) -> None:
    samples = range(SAMPLES)
    member = Member(served(a=collator(task=Draws)), own(Draws(), samples), samples)
    Draws.gate.clear()
    first, second = (member.collators.submit(FIRST, 1) for _ in range(2))
    assert Draws.begun.wait(PATIENCE_S)
    second.cancel()
    with pytest.raises(CancelledError):
        second.result()
    Draws.gate.set()
    assert first.result()[0].batch["ids"] == [0, 1, 2, 3]
    assert member.passes()[0].batch["ids"] == [0, 1, 2, 3]
    assert member.notices == []


def test_who_does_not_know_the_key_is_told_nothing(served: Any) -> None:
    place = served(a=collator())["a"]
    with socket.create_connection((place.address, place.port)) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    assert Member({"a": place}, own()).passes()[0].batch.tolist() == [0, 1, 2, 3]


def test_passes_of_others_are_refused() -> None:
    """One that gives what was not asked for is left out."""
    door, place = listen("127.0.0.1")

    def lie() -> None:
        connection, _ = door.accept()
        known = welcome(connection, place)
        assert known is not None
        stream = known[1]
        assert hear(stream)[0]["do"] == "begin"
        tell(stream, {"begun": ""})
        told = hear(stream)[0]
        tell(stream, {"id": told["id"], "passes": []})
        with contextlib.suppress(Exception):
            hear(stream)
        stream.close()

    liar = threading.Thread(target=lie, daemon=True)
    liar.start()
    with door:
        member = Member({"liar": place}, own())
        assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]
        assert member.heard.wait(PATIENCE_S)
        assert "not the passes" in member.notices[0]["why"]
        liar.join(PATIENCE_S)
        assert not liar.is_alive()


def test_one_that_says_nothing_is_lost() -> None:
    """A process that is frozen still has its connections acknowledged by its kernel."""
    door, place = listen("127.0.0.1")
    over, clock = threading.Event(), VirtualClock()

    def freeze() -> None:
        connection, _ = door.accept()
        known = welcome(connection, place)
        assert known is not None
        assert hear(known[1])[0]["do"] == "begin"
        tell(known[1], {"begun": ""})
        assert hear(known[1])[0]["do"] == "make"
        clock.advance(31.0)
        assert over.wait(PATIENCE_S)
        known[1].close()

    frozen = threading.Thread(target=freeze, daemon=True)
    frozen.start()
    with door:
        member = Member({"frozen": place}, own(), clock=clock)
        assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]
        assert "it has said nothing for 31 s" in member.notices[0]["why"]
        over.set()
        frozen.join(PATIENCE_S)
        assert not frozen.is_alive()


class Free(Draws):
    """The same batches, which nobody holds back; the collators' are let go once there are three."""

    gate = threading.Event()
    gate.set()

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.made += 1
        if self.made == 3:
            Draws.gate.set()
        return super().batch(samples, rng)


def test_what_a_collator_is_not_at_yet_a_member_can_make_the_last_first(served: Any) -> None:
    samples, mine = range(SAMPLES), Free()
    member = Member(served(a=collator(task=Draws)), own(mine, samples), samples)
    Draws.gate.clear()
    asked = [member.collators.submit(BOTH, 1) for _ in range(2)]
    assert Draws.begun.wait(PATIENCE_S)
    assert [member.collators.help() for _ in range(3)] == [True] * 3
    assert not member.collators.help()  # the collator is at what is left
    whole = own(Draws(), samples).passes(BOTH, 1)
    assert all(same(one.result(), whole) for one in asked)
    assert (mine.made, member.notices) == (3, [])


def test_who_would_wait_for_a_step_makes_a_part_of_those_to_come(served: Any) -> None:
    samples, mine = range(SAMPLES), Free()
    collate = own(mine, samples)
    member = Member(served(a=collator(task=Draws)), collate, samples)
    collate.making = Making(elsewhere=member.collators)
    Draws.gate.clear()
    steps = Steps(samples=SAMPLES, global_batch=8, micro_batch=4)
    feed = Feed(
        collate,
        lambda span: span.micro_batches,
        itertools.islice(steps.walk(0, Position()), 3),
        fuse=lambda: 1,
        depth=3,
        clock=SystemClock(),
    )
    theirs = own(Draws(), samples)
    for epoch in range(3):
        work = feed.take()
        whole = theirs.passes(work.span.micro_batches, 1)
        assert (work.span.epoch, len(whole)) == (epoch, 2)
        assert same(work.passes, whole)
    assert mine.made >= 3
    feed.close()


def test_what_fails_here_is_left_to_the_collators(served: Any) -> None:
    class Whole(Torn):
        here = True

        def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
            Draws.begun.set()
            assert Draws.gate.wait(PATIENCE_S)
            return super().batch(samples, rng)

    samples = range(SAMPLES)
    member = Member(served(a=collator(task=Whole)), own(Torn(), samples), samples)
    Draws.gate.clear()
    asked = member.collators.submit(BOTH, 1)
    assert Draws.begun.wait(PATIENCE_S)
    assert member.collators.help()
    later = threading.Thread(target=asked.parts[1].result)
    later.start()  # asks again
    Draws.gate.set()
    later.join(PATIENCE_S)
    assert [one.batch.tolist() for one in asked.result()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (member.notices, member.collators.help()) == ([], False)


def test_two_that_ask_the_same_are_two(served: Any) -> None:
    member = Member(served(a=collator()), own())
    assert member.collators.submit(FIRST, 1) != member.collators.submit(FIRST, 1)


def test_what_is_closed_asks_nobody(served: Any) -> None:
    member = Member(served(a=collator()), own())
    member.collators.close()
    assert member.passes()[0].batch.tolist() == [0, 1, 2, 3]
    assert member.notices == []
