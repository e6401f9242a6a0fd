"""What a step costs: its seconds and bytes, for any shares and any way in which updates travel.

    step = slowest computing + what of the exchange nothing hides + what each step costs besides

The slowest worker computes T(b) = fixed_s + b * micro_batch_s for its share b (`Speed`). N members
exchange M bytes of gradient, C of codes, over links of B bytes a second whose round trip takes R:

    ring, direct    2 (N - 1) / N * C / B                 R/2 * 2 (N - 1), R/2 * 2; R/2 of two
    tree            2 (Z - 1) / Z * C / B over trunks     as direct of Z, and R inside zones
    servers         the busiest node's bytes / B          R/2 * 2

(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
2009.) What goes through TCP takes processor time, too, which is missing to a worker that computes
on all cores it has (`transport_seconds`). Servers that nobody waits for go on beside all computing.
Rounds of H steps divide it by H, and nothing hides it. The source papers' equations are the coarse
form of this: T = T_data + T_model, T_total = T_local + T_global, and S_compressed = S_original *
C_rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from raycloud.planner.shares import step_seconds
from raycloud.planner.speed import Speed
from raycloud.spec import Job, SyncPoint
from raycloud.spec.sections import STREAMED_PERIODS
from raycloud.spec.sizes import PAIR, coded_bytes, ring_bytes, served_bytes, tree_bytes

if TYPE_CHECKING:
    from raycloud.events import MemberReady

LOOPBACK_BYTES_PER_S = 1e9  # between workers of one machine
_BACKWARD = 2 / 3  # of a pass's seconds: backward costs about twice the forward
# Seconds that a step takes beside computing, where none was seen: the update and what is told of
# it; and, with others, the control lane and the messages.
_ALONE_S, _TOGETHER_S = 0.001, 0.003
# Seconds of a core for each byte of fp32 gradient that goes through a codec: encoded, added up,
# encoded once more, and added. Of two that exchange it is less.
_CODING_S = {"none": 0.0, "bf16": 0.4e-9, "int8": 1.0e-9, "int4": 1.2e-9, "topk": 2.5e-9}
# Seconds of a core for each byte that goes out through TCP, with the one that comes in for it: on
# the testbed 30 ms at most for the 11.4 MB that each of four sends to exchange 7.6.
_TRANSPORT_S = 2.6e-9
_EACH_STEP, _ROUND_STEPS = ("bf16", "int8", "int4"), (8, 16)
# By what a prediction is taken to be off at most: computing, a link's rate, the rest. Tries on an
# idle machine are shorter than steps on a busy one; what a run has shown is better known.
_TRIED = ((0.93, 1.25, 0.5), (1.2, 0.8, 3.0))
_SEEN = ((0.95, 1.1, 0.7), (1.08, 0.9, 1.4))


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestPass:
    """The largest pass that the memory of each member holds.

    Attributes:
        samples: Of it.
        tried: Of the largest that was computed; a larger one is foretold.
        sample_bytes: What each sample takes more.
    """

    samples: int
    tried: int
    sample_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured of a task on the machines there are.

    Attributes:
        samples: Samples of one epoch.
        parameters: Trained numbers of the model.
        gradient_bytes: Bytes of one dense exchange of gradients.
        state_bytes: Bytes of a checkpoint: parameters, optimizer, buffers.
        speeds: One per member in their order, or a single one that stands for all.
        link_bytes_per_s: Rate of the slowest link of the ring; None where it was not measured.
        round_trip_s: Of the farthest two neighbours in the ring.
        overhead_s: What a step has been seen to take beside computing and exchange; None: no step
            was seen.
        waited_s: What a step of this job has been seen to wait for its exchange, of who waits
            least: that counts then for the way in which its updates travel.
        largest: What memory holds; None where it was not found out.
        core_watts: Of a busy core of nodes by name, where a member there has told.
        cores: Of each member, that compute and carry its messages, too; none: it is not known, or
            other ones carry them. Looked at where no step was seen.
    """

    samples: int
    parameters: int
    gradient_bytes: int
    state_bytes: int
    speeds: tuple[Speed, ...]
    link_bytes_per_s: float | None = None
    round_trip_s: float = 0.0
    overhead_s: float | None = None
    waited_s: float | None = None
    largest: LargestPass | None = None
    cores: tuple[float, ...] = ()
    core_watts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, readies: Sequence[MemberReady]) -> Profile:
        """As members measured it: sizes are the first one's."""
        first, smallest = readies[0], min(readies, key=lambda ready: ready.pass_samples)
        return cls(
            samples=first.samples,
            parameters=first.parameters,
            gradient_bytes=first.gradient_bytes,
            state_bytes=first.state_bytes,
            speeds=tuple(Speed(fixed_s=r.fixed_s, micro_batch_s=r.micro_batch_s) for r in readies),
            largest=LargestPass(
                samples=smallest.pass_samples,
                tried=smallest.pass_tried,
                sample_bytes=smallest.sample_bytes,
            )
            if smallest.pass_samples
            else None,
            cores=tuple(r.quota or math.inf for r in readies)
            if any(r.quota for r in readies)
            else (),
            core_watts={r.node: r.core_watts for r in readies if r.core_watts is not None},
        )

    def __post_init__(self) -> None:
        """Refuse numbers from which nothing can be predicted."""
        if self.samples < 1 or min(self.parameters, self.gradient_bytes, self.state_bytes) < 0:
            raise ValueError(f"a profile takes samples >= 1 and sizes >= 0, got {self}")
        if not self.speeds or any(speed.seconds(1) <= 0 for speed in self.speeds):
            raise ValueError(f"a profile takes speeds of more than 0 seconds, got {self.speeds}")
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(f"link_bytes_per_s takes a rate > 0, got {self.link_bytes_per_s}")
        if not self.round_trip_s >= 0 or not (self.overhead_s or 0.0) >= 0:
            raise ValueError(
                "round_trip_s and overhead_s take seconds >= 0, got "
                f"{self.round_trip_s} and {self.overhead_s}"
            )
        if self.cores and not min(self.cores) > 0:
            raise ValueError(f"cores takes numbers above 0, got {self.cores}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step costs if nothing changes.

    Attributes:
        step_s: Seconds from commit to commit. Without a link rate: but for the exchange.
        samples_per_s: Samples committed per second at that rate.
        compute_s: Seconds of computing of the worker which ends last.
        exchange_s: Seconds of a step's exchange on its own, of a round's by its steps; None where
            no link rate was measured.
        bytes_per_step: Bytes each member sends per step.
        exposed_s: Of `exchange_s` what nothing hides.
        low_s: It is likely from here, by what measures are taken to be off; 0: nothing is said.
        high_s: To here.
    """

    step_s: float
    samples_per_s: float
    compute_s: float
    exchange_s: float | None
    bytes_per_step: int
    exposed_s: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another way for updates to travel, and what a step would cost by it."""

    sync: SyncPoint
    predicted: Prediction


Counts = tuple[Sequence[int], Sequence[int]]
"""How many workers each node has, and how many servers, of the nodes that have either."""


def exposed_seconds(
    exchange_s: float, *, last_pass_s: float, bucket_bytes: int, gradient_bytes: int
) -> float:
    """Seconds by which an exchange lengthens the step, when it overlaps with the last backward.

    Buckets leave one after another while the last pass of the slowest worker runs backward, which
    takes 2/3 of its seconds. The first one, as large a part p = bucket_bytes / gradient_bytes as
    the others, leaves when that part of the backward has ended, and the last one at its end. That
    is a pipeline of two stages: the slower one never waits once it has begun, so

        exposed = max(exchange_s - (1 - p) * 2/3 * last_pass_s, p * exchange_s).

    (As DDP overlaps them: Li et al., "PyTorch distributed: experiences on accelerating data
    parallel training", VLDB 2020.)

    >>> round(exposed_seconds(1.0, last_pass_s=0.75, bucket_bytes=1, gradient_bytes=10), 6)
    0.55
    >>> exposed_seconds(1.0, last_pass_s=60.0, bucket_bytes=1, gradient_bytes=10)
    0.1
    """
    if gradient_bytes == 0:
        return exchange_s
    last = min(1.0, bucket_bytes / gradient_bytes)
    return max(exchange_s - (1.0 - last) * _BACKWARD * last_pass_s, exchange_s * last)


def transport_seconds(speeds: Sequence[Speed], sent: int, cores: Sequence[float]) -> list[Speed]:
    """Speeds of workers whose cores carry `sent` bytes a step through TCP, beside computing.

    >>> one = Speed(fixed_s=0.0, micro_batch_s=0.5)
    >>> [round(x.fixed_s, 4) for x in transport_seconds([one] * 2, 11_400_000, (0.4, 8.0))]
    [0.0741, 0.0037]
    """
    if not cores:
        return list(speeds)
    each = zip(speeds, cores, strict=True)
    return [replace(one, fixed_s=one.fixed_s + _TRANSPORT_S * sent / n) for one, n in each]


def exchange_seconds(
    sync: SyncPoint,
    gradient_bytes: int,
    zones: Sequence[int],
    *,
    bytes_per_s: float,
    round_trip_s: float = 0.0,
    counts: Counts = ((), ()),
) -> float:
    """Seconds of one exchange on its own, over links of one rate.

    >>> exchange_seconds(SyncPoint(), 1000, [4], bytes_per_s=1000, round_trip_s=0.5)
    3.0
    >>> direct = SyncPoint(topology="direct", codec="int4")
    >>> exchange_seconds(direct, 1024, [4], bytes_per_s=240, round_trip_s=0.5)
    1.5
    """
    members, codes = sum(zones), _code_bytes(sync, gradient_bytes, zones)
    if members == 1:
        return 0.0
    slowest, hops = ring_bytes(codes, members), 2 * (members - 1)
    if sync.topology == "servers":
        # On one machine all stays there, through its memory.
        slowest, hops = (served_bytes(codes, *counts) if any(counts[1]) else 0) or codes, 2
    elif sync.topology == "direct":
        hops = _latencies(members)
    elif sync.topology == "tree":
        inside = 2 if _parties(sync, zones) < members else 0
        hops = _latencies(_parties(sync, zones)) + inside
        if 1 < len(zones) < members:
            _, slowest = tree_bytes(gradient_bytes, codes, zones)
    return slowest / bytes_per_s + hops * round_trip_s / 2


def _latencies(parties: int) -> int:
    """Of direct exchange, one after the other."""
    return min(parties, PAIR + 1) - 1


def _code_bytes(sync: SyncPoint, gradient_bytes: int, zones: Sequence[int]) -> int:
    """Bytes of a gradient's codes; of two that exchange they are encoded once."""
    direct = sync.topology in {"direct", "tree"}
    pair = direct and _parties(sync, zones) == PAIR
    return coded_bytes(gradient_bytes, sync.codec, sync.ratio, pair=pair)


def _parties(sync: SyncPoint, zones: Sequence[int]) -> int:
    """Who exchange with each other: the members, or the zones of a tree where there are several."""
    return len(zones) if sync.topology == "tree" and len(zones) > 1 else sum(zones)


def link_of(
    sync: SyncPoint,
    zones: Sequence[int],
    exchanged: Sequence[tuple[int, float]],
    counts: Counts = ((), ()),
) -> tuple[float, float] | None:
    """Rate in bytes per second and round trip of links over which messages were summed.

    `exchanged` are their bytes and seconds, the smallest first. They are the inverse of
    `exchange_seconds`: that line through the smallest and the largest, which gives the seconds of
    the largest. None: they show no rate.

    >>> point = SyncPoint(topology="direct")
    >>> seconds = [exchange_seconds(point, n, [4], bytes_per_s=2e6, round_trip_s=0.08)
    ...            for n in (16_000, 256_000)]
    >>> rate, round_trip_s = link_of(point, [4], list(zip((16_000, 256_000), seconds)))
    >>> f"{rate:.6g} {round_trip_s:.6g}"
    '2e+06 0.08'
    """
    plain = replace(sync, codec="none", ratio=None)
    sent = [
        exchange_seconds(plain, size, zones, bytes_per_s=1.0, counts=counts)
        for size, _ in exchanged
    ]
    if not sent or not sent[-1] > 0.0 or not exchanged[-1][1] > 0.0:
        return None
    hops = exchange_seconds(plain, 0, zones, bytes_per_s=1.0, round_trip_s=2.0, counts=counts)
    bytes_more, seconds_more = sent[-1] - sent[0], exchanged[-1][1] - exchanged[0][1]
    if bytes_more > 0.0 and seconds_more > 0.0:
        rate = bytes_more / seconds_more
        rate = max(rate, sent[-1] / exchanged[-1][1])  # what is left over is no time below 0
    else:
        rate = sent[-1] / exchanged[-1][1]
    left_s = max(0.0, exchanged[-1][1] - sent[-1] / rate)
    return rate, 2.0 * left_s / hops


def sent_bytes(sync: SyncPoint, gradient_bytes: int, zones: Sequence[int]) -> int:
    """Bytes that each member sends a step, on average."""
    members, codes = sum(zones), _code_bytes(sync, gradient_bytes, zones)
    sent = ring_bytes(codes, members)
    if sync.topology == "servers" and members > 1:
        sent = codes
    elif sync.topology == "tree" and len(zones) > 1:
        sent, _ = tree_bytes(gradient_bytes, codes, zones)
    return int(sent * _exchanges(sync) / sync.period)


def _exchanges(sync: SyncPoint) -> float:
    """Of everything, in a period, on average: what travels in fragments does so at the end, too.

    >>> _exchanges(SyncPoint(period=16)), _exchanges(SyncPoint(period=16, stream=4))
    (1.0, 1.1875)
    """
    if sync.stream == 1:
        return 1.0
    return (STREAMED_PERIODS + 1.0 - 1.0 / sync.stream) / STREAMED_PERIODS


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step of `job` costs, by any way for updates to travel.

    Attributes:
        job: What is asked.
        profile: What was measured of the task; its own speeds are not looked at.
        speeds: One per member.
        shares: Their micro-batches.
        zones: How many members each zone of a tree has.
        counts: Where servers that sum in lockstep are; none: no node has one.
    """

    job: Job
    profile: Profile
    speeds: tuple[Speed, ...]
    shares: tuple[float, ...]
    zones: tuple[int, ...]
    counts: Counts = ((), ())

    def predict(self, sync: SyncPoint) -> Prediction:
        """A step by this way, and how sure that is."""
        factors = _TRIED if self.profile.overhead_s is None else _SEEN
        low_s, high_s = (self.off(*by).predict_as_is(sync).step_s for by in factors)
        return replace(self.predict_as_is(sync), low_s=low_s, high_s=high_s)

    def alternatives(self) -> tuple[Alternative, ...]:
        """By other ways, the exact one first, then by what they may lose.

        None where it is not known how fast links are, or nothing travels; without rounds where
        something in the job cannot be in rounds.
        """
        if self.profile.link_bytes_per_s is None or len(self.speeds) == 1:
            return ()
        zoned = 1 < len(self.zones) < len(self.speeds)
        coded: Literal["tree", "direct"] = "tree" if zoned else "direct"
        points = [SyncPoint(), *(SyncPoint(topology=coded, codec=c) for c in _EACH_STEP)]
        points += [
            SyncPoint(topology=coded, codec="int4", period=steps)
            for steps in _ROUND_STEPS
            if steps <= self.job.auto_period
        ]
        return tuple(Alternative(sync=one, predicted=self.predict(one)) for one in points)

    def off(self, compute: float, rate: float, besides: float) -> Costs:
        """The same, where what was measured was wrong by these factors."""
        speeds = tuple(
            replace(one, fixed_s=compute * one.fixed_s, micro_batch_s=compute * one.micro_batch_s)
            for one in self.speeds
        )
        link, waited_s = self.profile.link_bytes_per_s, self.profile.waited_s
        profile = replace(
            self.profile,
            link_bytes_per_s=None if link is None else rate * link,
            overhead_s=besides * self._overhead_s,
            waited_s=None if waited_s is None else waited_s / rate,
        )
        return replace(self, profile=profile, speeds=speeds)

    @property
    def _overhead_s(self) -> float:
        if self.profile.overhead_s is not None:
            return self.profile.overhead_s
        return _ALONE_S if len(self.speeds) == 1 else _TOGETHER_S

    def predict_as_is(self, sync: SyncPoint) -> Prediction:
        """The same, as if all that was measured were exact."""
        profile = self.profile
        sent = sent_bytes(sync, profile.gradient_bytes, self.zones)
        cores = () if profile.overhead_s is not None else profile.cores
        compute_s = step_seconds(transport_seconds(self.speeds, sent, cores), self.shares)
        exchange_s: float | None = None
        exposed_s = 0.0
        if sent == 0:
            exchange_s = 0.0
        elif profile.link_bytes_per_s is not None:
            whole_s = exchange_seconds(
                sync,
                profile.gradient_bytes,
                self.zones,
                bytes_per_s=profile.link_bytes_per_s,
                round_trip_s=profile.round_trip_s,
                counts=self.counts,
            )
            coding_s = _CODING_S[sync.codec] * profile.gradient_bytes
            exchange_s = whole_s * _exchanges(sync) / sync.period
            exposed_s = coding_s / sync.period + self._exposed_s(sync, whole_s, compute_s)
        if profile.waited_s is not None and sync == self.job.sync_point:
            exposed_s = profile.waited_s
        step_s = compute_s + exposed_s + self._overhead_s
        return Prediction(
            step_s=step_s,
            samples_per_s=self.job.global_batch / step_s,
            compute_s=compute_s,
            exchange_s=exchange_s,
            bytes_per_step=sent,
            exposed_s=None if exchange_s is None else exposed_s,
        )

    def _exposed_s(self, sync: SyncPoint, whole_s: float, compute_s: float) -> float:
        """Of the exchange itself, by step."""
        if sync.topology == "servers" and sync.staleness:
            return max(0.0, whole_s / sync.period - compute_s)
        if sync.stream > 1:
            at_end_s = whole_s / (STREAMED_PERIODS * sync.period)
            return at_end_s + max(0.0, whole_s / sync.period - compute_s)
        if sync.period > 1:
            return whole_s / sync.period
        gradient_bytes = self.profile.gradient_bytes
        return exposed_seconds(
            whole_s,
            last_pass_s=self._last_pass_s(),
            bucket_bytes=self.job.bucket_bytes(gradient_bytes),
            gradient_bytes=gradient_bytes,
        )

    def _last_pass_s(self) -> float:
        """Of the worker that ends last; where nothing is fused, none are found to be fixed."""
        last = max(range(len(self.speeds)), key=lambda i: self.speeds[i].seconds(self.shares[i]))
        speed, share = self.speeds[last], self.shares[last]
        most = math.inf if self.job.fuse == "auto" else self.job.fuse
        return speed.seconds(min(share, most) if speed.fixed_s > 0.0 else min(share, 1))
