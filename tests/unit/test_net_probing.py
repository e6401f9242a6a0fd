"""Links measured before the first step: growing sums, agreed on, over real sockets and a script."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.clock import Clock, SystemClock, VirtualClock
from raycloud.commands import Form
from raycloud.errors import TransportError
from raycloud.events import ExchangeBroken, GenerationFormed, SyncPoint
from raycloud.net.lane import Lane
from raycloud.net.probing import Exchanged, probe_links
from raycloud.net.transport import Transport
from raycloud.planner.cost import exchange_seconds, link_of
from raycloud.spec.sizes import ring_bytes
from raycloud.worker import worker
from tests.fellows import Fellows
from tests.sockets import direct_members, gloo_members, together
from tests.unit.test_recovery_catch_up import asked, check_end

MOST = 2**20
HOST = torch.device("cpu")


class Done:
    """A work that is complete."""

    def wait(self, timeout_s: float) -> bool:
        return True


class Slow:
    """One of four members whose links have a rate, a latency, and a burst that passes at once."""

    rank, size = 0, 4

    def __init__(
        self, clock: VirtualClock, rate: float, latency_s: float, burst: int = 0, lost: int = 0
    ) -> None:
        self.clock, self.rate, self.latency_s, self.burst = clock, rate, latency_s, burst
        self.lost = lost  # messages that wait for a lost packet
        self.sizes: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> Done:
        self.sizes.append(tensor.nbytes)
        sent = ring_bytes(tensor.nbytes, self.size)
        passed = min(self.burst, sent)
        self.burst -= passed
        loses = self.lost > 0 and sent > passed
        self.lost -= loses
        waits_s = 0.3 * loses
        self.clock.advance((sent - passed) / self.rate + self.latency_s + waits_s)
        return Done()


class Agreeing:
    """The control lane of one whose fellows have all seen what it has."""

    @staticmethod
    def abandoned() -> bool:
        return False

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values] * 4


def scripted(
    most_bytes: int,
    rate: float,
    latency_s: float,
    burst: int = 0,
    *,
    step_bytes: int | None = None,
    lost: int = 0,
) -> tuple[Slow, Any]:
    clock = VirtualClock()
    slow: Any = Slow(clock, rate, latency_s, burst, lost)
    lane: Any = Agreeing()
    exact = most_bytes if step_bytes is None else step_bytes
    told = {"most_bytes": most_bytes, "step_bytes": exact, "device": HOST, "clock": clock}
    return slow, probe_links(slow, lane, **told)


@pytest.mark.parametrize("rate", [1e5, 2.5e6, 12.5e6, 125e6, 1e10])
@pytest.mark.parametrize("latency_s", [0.0, 0.08])
def test_the_rate_is_found_soon_and_the_gradient_s_seconds_are_predicted(
    rate: float, latency_s: float
) -> None:
    burst = 140_000 if rate > 1e6 else 70_000
    slow, exchanged = scripted(7_600_000, rate, latency_s, burst)
    exact_s = ring_bytes(7_600_000, 4) / rate + latency_s
    like_a_step_s = 1.3 if rate == 2.5e6 else 0.0  # the only one that is thin, but not very
    assert slow.clock.monotonic_s() < 0.25 + 0.04 * exact_s + 7 * latency_s + like_a_step_s
    found = link_of(SyncPoint(), (1, 1, 1, 1), exchanged)
    assert found is not None
    predicted_s = exchange_seconds(
        SyncPoint(), 7_600_000, (1, 1, 1, 1), bytes_per_s=found[0], round_trip_s=found[1]
    )
    assert predicted_s == pytest.approx(exact_s, rel=0.06)


def test_no_message_is_larger_than_what_a_step_exchanges() -> None:
    slow, exchanged = scripted(1000, 1e9, 0.001)
    assert slow.sizes == [1000, 1000]
    assert [size for size, _ in exchanged] == [1000]
    assert scripted(0, 1e9, 0.001)[1] == ()


def test_a_burst_that_passes_first_costs_no_more_than_a_step() -> None:
    slow, exchanged = scripted(7_600_000, 2.5e6, 0.0, burst=500_000)
    assert slow.clock.monotonic_s() < 1.3
    found = link_of(SyncPoint(), (1, 1, 1, 1), exchanged)
    assert found is not None
    assert found[0] == pytest.approx(2.5e6, rel=0.06)


def test_a_message_like_a_step_s_tells_what_those_that_lost_packets_do_not() -> None:
    step_bytes = 1_187_500
    told = {"most_bytes": 7_600_000, "rate": 2.5e6, "latency_s": 0.0, "burst": 100_000, "lost": 2}
    slow, exchanged = scripted(**told, step_bytes=step_bytes)
    assert slow.clock.monotonic_s() < 3.5
    assert [size for size, _ in exchanged][-1] == max(slow.sizes) <= step_bytes
    seconds = []
    for some in (exchanged, scripted(**told, step_bytes=0)[1]):
        found = link_of(SyncPoint(), (1, 1, 1, 1), some)
        assert found is not None
        rate, round_trip_s = found
        seconds.append(
            exchange_seconds(
                SyncPoint(), step_bytes, (1, 1, 1, 1), bytes_per_s=rate, round_trip_s=round_trip_s
            )
        )
    exact_s = ring_bytes(step_bytes, 4) / 2.5e6
    assert seconds[0] == pytest.approx(exact_s, rel=0.06)
    assert seconds[1] > 1.6 * exact_s


def test_where_a_burst_hid_how_thin_a_link_is_one_long_message_is_enough() -> None:
    slow, exchanged = scripted(7_600_000, 0.5e6, 0.0, burst=300_000)
    assert len(slow.sizes) == 4
    assert slow.sizes[-1] == 4 * slow.sizes[-2] == exchanged[-1][0]


@pytest.mark.parametrize("rate", [1e5, 125e6])
def test_links_are_not_measured_longer_where_the_first_message_or_a_step_tells(rate: float) -> None:
    short, long = (scripted(7_600_000, rate, 0.0, step_bytes=n)[0] for n in (0, 7_600_000))
    assert short.sizes == long.sizes


@pytest.mark.parametrize(
    "members", [gloo_members, direct_members, partial(direct_members, zones="aab")]
)
def test_all_find_the_same_over_sockets(
    members: Callable[[int], AbstractContextManager[list[Transport]]],
) -> None:
    clock: Clock = SystemClock()

    def measured(gradients: Transport, lane: Transport) -> Exchanged:
        told = {"most_bytes": MOST, "step_bytes": MOST, "device": HOST, "clock": clock}
        return probe_links(gradients, Lane(lane), **told)

    with members(3) as gradients, direct_members(3) as lanes:
        pairs = zip(gradients, lanes, strict=True)
        first, *others = together(partial(measured, *pair) for pair in pairs)
    assert others == [first, first]
    sizes = [size for size, _ in first]
    assert sizes == sorted(set(sizes))
    assert 2**18 <= sizes[-1] <= MOST
    assert all(seconds > 0.0 for _, seconds in first)


@pytest.mark.parametrize("nodes", [("a", "b"), ("a", "a")])
def test_members_on_several_nodes_measure_before_their_first_step_and_stay_exact(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.nodes = nodes
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    check_end(fellows, job, (0, 1))
    [formed] = [event for event in fellows.events if isinstance(event, GenerationFormed)]
    assert (formed.exchanged != ()) == (nodes == ("a", "b"))


@pytest.mark.timeout(120)
def test_who_dies_while_links_are_measured_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(gradients: Transport, lane: Lane, **told: Any) -> Exchanged:
        if (gradients.rank, gradients.size) == (2, 3):
            fellows.members[2].abandon(0)
            raise TransportError("it is gone")
        return probe_links(gradients, lane, **told)

    monkeypatch.setattr(worker, "probe_links", dies)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    fellows.nodes = ("a", "b", "c")
    fellows.form(Form(generation=0, members=(0, 1, 2), shares=(3, 3, 2), step=0))
    fellows.until(ExchangeBroken, (0, 1), unless=ExchangeBroken)  # control waits for one, too
    fellows.form(Form(generation=1, members=(0, 1), shares=(5, 3), step=0))
    check_end(fellows, job, (0, 1))
    formed = [event for event in fellows.events if isinstance(event, GenerationFormed)]
    assert [one.generation for one in formed] == [1]
    assert formed[0].exchanged
