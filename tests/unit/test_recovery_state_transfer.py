"""A state from those who have it to those who take it, over real sockets: whole or not at all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from raycloud.errors import TransportError
from raycloud.net.gloo import GlooTransport
from raycloud.net.lane import Lane
from raycloud.net.stream import SOCKETS, Arrivals, Stream, connect
from raycloud.net.transport import Abandoned
from raycloud.recovery import state_transfer
from raycloud.recovery.receiving import ASK, PIECE_BYTES, Receiver
from raycloud.recovery.rendezvous import HOST
from raycloud.recovery.state_transfer import Sender, hand_over, sources
from raycloud.step.state import ModelState
from raycloud.step.stateful import ReplicaState
from tests.lockstep import never
from tests.sockets import alike, gloo_members, together

ANY = {
    "weight": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "odd": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
    "step": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "used": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
LARGE = {"a": torch.arange(5 * PIECE_BYTES // 4 + 3), "b": torch.rand(3 * PIECE_BYTES // 4).mul(9)}


class State(ReplicaState):
    """One of any tensors: what a replica's state is to those who hand it over."""

    def __init__(self, tensors: dict[str, torch.Tensor], values: dict[str, int]) -> None:
        self.held, self.kept = tensors, values

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.held

    def values(self) -> dict[str, int]:
        return self.kept

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, int]) -> None:
        self.held, self.kept = dict(tensors), dict(values)


class Group:
    """Members that meet: those of `givers` have `whole`, in any order, all others nothing.

    Attributes:
        errors: What was raised, by rank.
    """

    def __init__(
        self,
        size: int,
        givers: Sequence[int],
        takers: Sequence[int],
        whole: dict[str, torch.Tensor],
    ) -> None:
        self._size, self._givers, self._takers = size, givers, takers
        self.states = [
            State(dict([*whole.items()][:: 1 - 2 * (rank % 2)]), {"n": rank})
            if rank in givers
            else State({}, {})
            for rank in range(size)
        ]
        self.errors: dict[int, TransportError] = {}

    def meet(self, abandoned: Callable[[], bool] = never) -> None:
        with gloo_members(self._size) as members:
            together(partial(self._take_part, member, abandoned) for member in members)

    def _take_part(self, member: GlooTransport, abandoned: Callable[[], bool]) -> None:
        try:
            hand_over(
                self.states[member.rank],
                givers=self._givers,
                takers=self._takers,
                address="127.0.0.1",
                lane=Lane(member, abandoned),
                host=HOST,
            )
        except TransportError as error:
            # What it was raised through would keep the members' transports alive.
            self.errors[member.rank] = error.with_traceback(None)


def ended() -> None:
    """No thread of any hand-over goes on."""
    for thread in threading.enumerate():
        if thread.name.startswith(("give-", "arrival")):
            thread.join(20.0)
            assert not thread.is_alive()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes of a state were sent, by where to."""
    found, send = Counter[str](), Stream.send

    def counted(stream: Stream, chunk: memoryview) -> None:
        found[f"to {stream._socket.getpeername()[1]}"] += len(chunk)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", counted)
    return found


@pytest.mark.parametrize(
    ("size", "givers", "takers"),
    [(2, (0,), (1,)), (3, (0, 2), (1,)), (4, (1, 3), (0, 2)), (4, (2,), (0, 1, 3))],
)
@pytest.mark.parametrize("whole", [ANY, LARGE, {}], ids=["any", "large", "nothing"])
def test_who_takes_it_has_it_whole_and_each_tensor_for_itself(
    size: int,
    givers: tuple[int, ...],
    takers: tuple[int, ...],
    whole: dict[str, torch.Tensor],
    sent: Counter[str],
) -> None:
    group = Group(size, givers, takers, whole)
    group.meet()
    ended()
    assert not group.errors
    for rank in takers:
        taken = group.states[rank]
        assert taken.kept == {"n": givers[0]}
        assert alike(taken.held, whole)
        for tensor in taken.held.values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    bytes_each = sum(t.numel() * t.element_size() for t in whole.values())
    assert sum(sent.values()) == bytes_each * len(takers)
    assert len(sent) == (len(takers) if whole else 0)


def test_who_neither_gives_nor_takes_sees_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_MOST_SENDERS", 2)
    asked: list[int] = []

    class Watched(State):
        def __init__(self, rank: int) -> None:
            super().__init__(dict(LARGE), {})
            self.rank = rank

        def tensors(self) -> dict[str, torch.Tensor]:
            asked.append(self.rank)
            return self.held

    group = Group(4, (0, 1, 2), (3,), LARGE)
    group.states[:3] = [Watched(rank) for rank in range(3)]
    group.meet()
    assert sorted(asked) == [0, 1]
    assert alike(group.states[3].held, LARGE)


def test_those_who_give_take_turns() -> None:
    every = [sources(range(40), taker) for taker in range(13)]
    assert all(len(set(some)) == len(some) == 8 and some[0] == 0 for some in every)
    given = Counter(rank for some in every for rank in some if rank)
    assert set(given.values()) == {2, 3}


@pytest.fixture
def slow_thread(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The first connection that sends is slow; how many pieces each has sent."""
    found, send, lock = Counter[int](), Stream.send, threading.Lock()
    pause = threading.Event()

    def slowed(stream: Stream, chunk: memoryview) -> None:
        with lock:
            slow = not found or id(stream) == next(iter(found))
            found[id(stream)] += 1
        if slow:
            pause.wait(0.2)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", slowed)
    return found


def test_who_is_slow_sends_less(slow_thread: Counter[int]) -> None:
    whole = {"a": torch.zeros(40 * PIECE_BYTES, dtype=torch.uint8)}
    group = Group(3, (0, 1), (2,), whole)
    group.meet()
    assert alike(group.states[2].held, whole)
    slow, fast = slow_thread.values()
    assert 40 <= slow + fast <= 60  # the first pieces are small
    assert slow <= 10


@pytest.mark.parametrize("how", ["hangs up", "damages"])
def test_where_one_breaks_off_nobody_has_half_of_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, before = Stream.send, threading.Semaphore(3)

    def breaks(stream: Stream, chunk: memoryview) -> None:
        if before.acquire(blocking=False):
            send(stream, chunk)
        elif how == "hangs up":
            stream.hang_up()
        else:
            stream.give(bytes.fromhex("0000000400000000"), b"lies")

    monkeypatch.setattr(Stream, "send", breaks)
    group = Group(4, (0, 1), (2, 3), LARGE)
    group.meet()
    ended()
    assert sorted(group.errors) == [0, 1, 2, 3]
    assert not any(isinstance(error, Abandoned) for error in group.errors.values())
    assert [group.states[rank].held for rank in (2, 3)] == [{}, {}]


def test_what_is_given_up_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives stands still."""
    over, held, send = threading.Event(), threading.Event(), Stream.send

    def stuck(stream: Stream, chunk: memoryview) -> None:
        over.set()
        assert held.wait(20.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", stuck)
    group = Group(3, (0, 1), (2,), LARGE)
    since_s: list[float] = []

    def abandoned() -> bool:
        if over.is_set():
            since_s.append(time.monotonic())
        return over.is_set()

    group.meet(abandoned)
    took_s = time.monotonic() - since_s[0]
    held.set()
    ended()
    assert took_s < 2.0
    assert len(group.errors) == 3
    assert any(isinstance(error, Abandoned) for error in group.errors.values())  # or it heard so
    assert group.states[2].held == {}


def trained(*, backwards: bool) -> ReplicaState:
    """A replica's, whose optimizer got its tensors in this order, as one that followed may have."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(5, 4)).square().mean().backward()
    optimizer.step()
    state = ReplicaState((ModelState(model, optimizer, None),))
    if backwards:
        state.load(dict([*state.tensors().items()][::-1]), state.values())
    return state


def test_those_who_give_may_have_got_it_in_orders_of_their_own() -> None:
    givers = [trained(backwards=False), trained(backwards=True)]
    listed = [list(state.tensors()) for state in givers]
    assert listed[0] != listed[1]
    assert sorted(listed[0]) == sorted(listed[1])
    taker = trained(backwards=False)
    for tensor in taker.tensors().values():
        tensor.zero_()

    def take_part(member: GlooTransport) -> None:
        state = [*givers, taker][member.rank]
        lane = Lane(member)
        hand_over(state, givers=(0, 1), takers=(2,), address="127.0.0.1", lane=lane, host=HOST)

    with gloo_members(3) as members:
        together(partial(take_part, member) for member in members)
    assert alike(taker.tensors(), givers[0].tensors())


def test_two_that_differ_give_nothing_together() -> None:
    group = Group(3, (0, 1), (2,), LARGE)
    group.states[1].held = {name: t.double() for name, t in LARGE.items()}
    group.meet()
    assert "differ in it" in str(group.errors[2])
    assert group.states[2].held == {}


@pytest.mark.parametrize("asked", [(0, SOCKETS.chunk_bytes + 1), (2**62, 8)])
def test_what_is_not_there_is_not_given(asked: tuple[int, int]) -> None:
    def ask(_: int, stream: Stream) -> None:
        stream.give(ASK.pack(*asked))
        stream.take(2**20)

    taker = Arrivals("127.0.0.1", 1, ask, lambda _: None)
    state = State(dict(LARGE), {})
    giving = Sender(state, 0, [taker.place], HOST)
    with pytest.raises(TransportError, match="are asked"):
        giving.wait(20.0)
    giving.close()
    taker.close()
    ended()


def test_what_nobody_tells_of_is_not_taken() -> None:
    taking = Receiver("127.0.0.1", 1, HOST)
    stream = connect(taking.place, 5)
    stream.tell({"layout": "", "tensors": None, "values": None})
    assert not taking.wait(0.05)
    taking.close()
    with pytest.raises(TransportError, match="closed"):
        stream.take(1)
    stream.close()
    ended()
