"""Exchange over real sockets, between threads of this process."""

from __future__ import annotations

import datetime
import json
import threading
import time

import pytest
import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net import gloo, sockets
from raycloud.net.gloo import GlooTransport
from raycloud.net.nccl import NcclWork
from raycloud.net.transport import Abandoned, finish
from tests.connections import deafen
from tests.lockstep import never
from tests.sockets import gloo_members, together

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STATE_DTYPES = (*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool)


def test_sums_and_copies() -> None:
    with gloo_members(3) as members:
        for dtype in DTYPES:
            tensors = [torch.arange(5).to(dtype) * (m.rank + 1) for m in members]
            works = [m.all_reduce(t) for m, t in zip(members, tensors, strict=True)]
            assert all(work.wait(10.0) for work in works)
            assert all(torch.equal(t, torch.arange(5).to(dtype) * 6) for t in tensors)
        for dtype in STATE_DTYPES:
            tensors = [torch.full((4,), m.rank).to(dtype) for m in members]
            works = [m.broadcast(t, 1) for m, t in zip(members, tensors, strict=True)]
            assert all(work.wait(10.0) for work in works)
            assert all(torch.equal(t, torch.ones(4).to(dtype)) for t in tensors)


def test_a_member_alone_sums_itself() -> None:
    with gloo_members(1) as (member,):
        tensor = torch.ones(3)
        assert member.all_reduce(tensor).wait(10.0)
        assert tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("timeout_s", [0.0, 0.0004, 0.02])
def test_waiting_ends_while_the_peer_has_not_come(timeout_s: float) -> None:
    with gloo_members(2) as (mine, theirs):
        tensor = torch.ones(2)
        work = mine.all_reduce(tensor)
        # In C a wait cannot be interrupted: in a thread, so that the peer can free it in the end.
        waited: list[bool] = []
        thread = threading.Thread(target=lambda: waited.append(work.wait(timeout_s)))
        thread.start()
        thread.join(10.0)
        stuck = thread.is_alive()
        assert theirs.all_reduce(torch.ones(2)).wait(10.0)
        thread.join()
        assert not stuck
        assert waited == [False]
        assert work.wait(10.0)
        assert work.wait(0.0)
        assert tensor.tolist() == [2.0, 2.0]


def test_exchanges_that_wait_for_each_other_are_all_under_way() -> None:
    with gloo_members(2) as (mine, theirs):
        tensors = [torch.ones(1000) * i for i in range(8)]
        works = [mine.all_reduce(tensor) for tensor in tensors]
        others = [theirs.all_reduce(tensor.clone()) for tensor in tensors]
        assert all(work.wait(10.0) for work in [*others, *reversed(works)])
        assert [tensor[0].item() for tensor in tensors] == [2.0 * i for i in range(8)]


def test_a_peer_that_closes_breaks_what_is_open_and_what_comes() -> None:
    with gloo_members(2) as (mine, theirs):
        done = [mine.all_reduce(torch.ones(2)), theirs.all_reduce(torch.ones(2))]
        assert all(work.wait(10.0) for work in done)
        open_still = mine.all_reduce(torch.ones(2))
        done.clear()  # a work keeps its sockets alive
        theirs.close()
        for work in (open_still, mine.all_reduce(torch.ones(2))):
            with pytest.raises(TransportError, match="broke"):
                finish(work, never)


@pytest.mark.parametrize("waits", [False, True])
def test_a_path_that_hangs_breaks_what_is_open(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way is not acknowledged; or nothing is, and who waits asks."""
    monkeypatch.setattr(sockets, "HUNG_S", 2)
    monkeypatch.setattr(sockets, "_IDLE_S", 1)
    with gloo_members(2) as (mine, theirs):
        if waits:
            work = mine.all_reduce(torch.ones(2))
            assert not work.wait(0.2)
        for connection in sockets._connections(mine._own, mine._others):
            deafen(connection)
        began_s = time.monotonic()
        if not waits:
            work = mine.all_reduce(torch.ones(2))
        other = theirs.all_reduce(torch.ones(2))
        for one in (work, other):
            with pytest.raises(TransportError, match="broke"):
                finish(one, lambda: time.monotonic() - began_s > 15.0)
        assert time.monotonic() - began_s < 5.0


def test_one_that_comes_and_cannot_be_reached_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "_CONNECTING", datetime.timedelta(milliseconds=300))
    limit = datetime.timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    store.set("listens/1", json.dumps([("127.0.0.1", 9)]))
    began_s = time.monotonic()
    with pytest.raises(TransportError, match="rank 0 could not meet the other 1"):
        GlooTransport(store, rank=0, size=2, address="127.0.0.1")
    assert time.monotonic() - began_s < 5.0


def test_finish_gives_up_when_the_generation_is_over() -> None:
    with gloo_members(2) as (mine, theirs):
        work = mine.all_reduce(torch.ones(2))
        with pytest.raises(Abandoned):
            finish(work, lambda: True)
        assert theirs.all_reduce(torch.ones(2)).wait(10.0)


def test_a_generation_is_built_beside_an_abandoned_one() -> None:
    with gloo_members(2) as (mine, silent):
        abandoned = mine.all_reduce(torch.ones(2))
        with gloo_members(2) as members:
            tensors = [torch.ones(2), torch.ones(2)]
            works = [m.all_reduce(t) for m, t in zip(members, tensors, strict=True)]
            assert all(work.wait(10.0) for work in works)
            assert tensors[0].tolist() == [2.0, 2.0]
        assert not abandoned.wait(0.001)
        # A group waits, where it ends, for what is open: only the peer can free it.
        assert silent.all_reduce(torch.ones(2)).wait(10.0)


def test_members_that_do_not_meet_give_up_when_the_store_does() -> None:
    short = datetime.timedelta(milliseconds=50)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=short)
    beside = dist.PrefixStore("generation-3/lane", store)
    with pytest.raises(TransportError, match="rank 0 could not meet the other 1") as error:
        GlooTransport(beside, rank=0, size=2, address="127.0.0.1")
    assert "ports" in error.value.hint


def test_an_exchange_outlasts_the_time_that_members_had_to_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "_CONNECTING", datetime.timedelta(seconds=2))
    with gloo_members(2, meeting_s=2.0) as (mine, theirs):
        tensors = [torch.ones(2), torch.ones(2)]
        works = [mine.all_reduce(tensors[0]), mine.broadcast(tensors[1], 1)]
        assert not works[0].wait(2.2)
        for work in (theirs.all_reduce(torch.ones(2)), theirs.broadcast(torch.zeros(2), 1)):
            assert work.wait(10.0)
        assert all(work.wait(10.0) for work in works)
        assert [tensor[0].item() for tensor in tensors] == [2.0, 0.0]


def test_the_wait_for_nccl_polls() -> None:
    with gloo_members(2) as (mine, theirs):  # NCCL's handles have the same methods
        handle, tensor = mine.all_reduce(torch.ones(2))._work, torch.ones(2)
        mine_open = NcclWork(handle, threading.Event())
        assert not mine_open.wait(0.001)
        assert theirs.all_reduce(tensor).wait(10.0)
        assert mine_open.wait(10.0)


def test_what_is_under_way_does_not_keep_a_group_from_ending() -> None:
    """One member never comes to the exchange: the other two are rid of it at once all the same."""
    with gloo_members(3) as members:
        works = [member.all_reduce(torch.ones(100_000)) for member in members[:2]]
        assert not any(work.wait(0.05) for work in works)
        works.clear()
        together(member.close for member in members)


def test_who_hangs_up_frees_those_that_wait_for_it() -> None:
    with gloo_members(2) as (mine, theirs):
        work = mine.all_reduce(torch.ones(2))
        assert not work.wait(0.01)
        theirs.hang_up()
        with pytest.raises(TransportError, match="broke"):
            work.wait(10.0)
        theirs.hang_up()  # once more does no harm
