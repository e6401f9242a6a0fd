"""Members let go of exchanges that nobody needs any more: real members, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.commands import Form, Meet
from raycloud.events import ExchangeBroken
from raycloud.net.gloo import GlooTransport
from raycloud.net.transport import Transport
from raycloud.recovery.rendezvous import Meeting
from raycloud.worker import member
from tests.fellows import WAIT_S, Fellows
from tests.unit.test_recovery_catch_up import asked, check_end


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here they share a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def wait_for(found: Callable[[], bool]) -> None:
    pause, end_s = threading.Event(), time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end_s
        pause.wait(0.01)


def hung_up(transport: Transport) -> bool:
    assert isinstance(transport, GlooTransport)
    return transport._over is not None


def left(transport: Transport) -> bool:
    return not hasattr(transport, "_group")


def meet_all_the_same(
    meet: Callable[..., Any], meeting: Meeting, _: Callable[[], bool]
) -> tuple[Transport, Transport]:
    """Whoever is called elsewhere meanwhile."""
    met: tuple[Transport, Transport] = meet(meeting, lambda: False)
    return met


@pytest.mark.timeout(120)
def test_whose_exchange_broke_hangs_up_where_nobody_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_ALONE_S", 0.5)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    life = fellows.members[0]._worker
    assert life is not None
    _, transports = life._met
    fellows.members[1].abandon(0)
    fellows.until(ExchangeBroken, (0,))
    wait_for(lambda: all(map(hung_up, transports)))
    fellows.form(Form(generation=1, members=(0, 1), shares=(5, 3), step=0))
    check_end(fellows, job, (0, 1))


@pytest.mark.timeout(120)
def test_whose_process_goes_on_as_another_hangs_up_at_once(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(1, 5)
    life = fellows.members[1]._worker
    assert life is not None
    _, transports = life._met
    fellows.members.append(fellows.members[1].rejoin_as(2))
    wait_for(lambda: all(map(hung_up, transports)))
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=0))
    check_end(fellows, job, (0,))


@pytest.mark.full(only="a meeting that is withdrawn")
@pytest.mark.timeout(120)
def test_what_was_met_ahead_and_withdrawn_is_left(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    meet = Meet(generation=1, members=(0, 1), shares=(5, 3))
    fellows.prepare(1, meet, (0, 1))  # no steps are computed in which it would take effect
    wait_for(lambda: all(1 in one._planned for one in fellows.members))
    old = [one for m in fellows.members for one in m._planned[1][1]]
    fellows.form(Form(generation=4, members=(0, 1), shares=(5, 3), step=0, settled=1))
    wait_for(lambda: all(map(left, old)))
    fellows.come_to(0, 3)
    assert all(not m._planned for m in fellows.members)
    check_end(fellows, job, (0, 1))


@pytest.mark.full(only="a meeting that was withdrawn before")
@pytest.mark.timeout(120)
def test_what_is_met_when_it_is_withdrawn_already_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Transport] = []
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    for one in fellows.members:
        one._host = replace(one._host, leave=met.extend)
        life = one._worker
        assert life is not None
        monkeypatch.setattr(life, "meet", partial(meet_all_the_same, life.meet))
    fellows.form(Form(generation=4, members=(0, 1), shares=(5, 3), step=0))
    fellows.prepare(1, Meet(generation=3, members=(0, 1), shares=(5, 3)), (0, 1))
    wait_for(lambda: len(met) == 4)
    assert all(not m._planned for m in fellows.members)
    check_end(fellows, job, (0, 1))
