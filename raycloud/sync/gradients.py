"""Exchange of gradients over members: out of place, overlapped with the last backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from raycloud.clock import Clock, SystemClock
from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.transport import Transport, Work, finish
from raycloud.sync.buckets import Bucket, Flags, lay_out
from raycloud.sync.sparse import SparseRows

if TYPE_CHECKING:
    from raycloud.sync.strategy import SyncStrategy

_CLOCK = SystemClock()

Gradients = tuple[torch.Tensor | None, ...]  # one a parameter; None: it was not used


_LOOKED_AT = 8  # one exchange in so many is looked at for the noise of gradients


_PAIR = 2  # members: fewer do not differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What an exchange brought.

    Attributes:
        norm: The gradients' global norm before clipping.
        own: That of what this member has added to it; NaN: it was not looked at.
        bytes_sent: By this member; of these `bytes_last` with the last message.
        agreed: All members held the next change when they sent their last gradients.
        late: A member had told by then that it takes far longer than usual.
        moves: All are to look anew which servers have the tables' rows.
        astray: A member has not sent its part of the step: this is no sum to go on with.
        exchange_s: Seconds waited for it.
        overlap_s: Seconds that it went on before that, while this member computed.
    """

    norm: float
    bytes_sent: int
    agreed: bool
    late: bool = False
    moves: bool = False
    astray: bool = False
    exchange_s: float = 0.0
    overlap_s: float = 0.0
    bytes_last: int = 0
    own: float = math.nan


class GradientExchange:
    """Averages gradients of parameters, by their qualified names, over the members of a generation.

    Order of calls, each step: any backward passes but the last; `begin`; the last backward; `send`;
    `collect`; then the optimizer; then `clear`. Buckets travel while the last backward runs on.

    A member's own gradients stay in `parameter.grad` until `collect` and are never written to: what
    travels is a scaled copy. When the exchange breaks, which `collect` raises, they are still
    there: after `connect`, more backward passes may add to them, and all goes on in another
    generation.

    When the last backward raises, `restart` forgets them, so that they are computed again; `send`
    then sends the rest of what the others wait for, and what `collect` brings everywhere is
    `astray`, as it is where `send` is told so. All then call `begin` and `send` once more.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        bucket_bytes: int,
        strategy: SyncStrategy,
        clock: Clock = _CLOCK,
        sparse: Container[int] = (),
        measured: bool = False,
    ) -> None:
        dense = [(name, p) for name, p in parameters if id(p) not in sparse]
        self._rows = [SparseRows(name, p) for name, p in parameters if id(p) in sparse]
        self.buckets = lay_out(dense, bucket_bytes)
        self._flags = Flags(self.buckets, parameters[-1][1].device, measured=measured)
        self._measures = measured
        self.measured: tuple[float, float] | None = None  # see `noise_of`
        self._strategy, self.residual = strategy, strategy.residual
        self._place = {
            parameter: (b, i)
            for b, bucket in enumerate(self.buckets)
            for i, parameter in enumerate(bucket.parameters)
        }
        self._clock = clock
        self.begun_s: float | None = None  # when the first message of the step left
        self._transport: Transport | None = None
        self._scale: float | None = None  # None: it has not begun
        self._sent_scale, self._collected = 1.0, 0
        self._hears = False  # what the backward pass under way finishes is sent
        self._restarted = self._nothing = False
        self._refuses = False
        self._works: list[Work | None] = []
        self._next = 0
        self._broken: TransportError | None = None
        self._names = {p: name for name, p in parameters}
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._finished)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Meanwhile no backward pass is the step's own: `TaskError` for its first gradient."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    def check_none(self) -> None:
        """Before a backward pass that is the first; `TaskError`: a parameter has a gradient."""
        if (made := next((p for p in self._names if p.grad is not None), None)) is not None:
            raise self._not_own(made)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all dense gradients."""
        return sum(bucket.payload_bytes for bucket in self.buckets)

    @property
    def sparse_bytes(self) -> int:
        """Bytes of all others, were they dense."""
        return sum(rows.bytes for rows in self._rows)

    def travel_by(self, strategy: SyncStrategy) -> None:
        """Sum buckets by another strategy, which is connected next."""
        self._strategy, self.residual = strategy, strategy.residual

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from the next step on; leave an older one's buffers behind."""
        abandoned = self._transport is not None and any(work is not None for work in self._works)
        if abandoned:  # a broken exchange may still write to its buffers: never touch them again
            for bucket in self.buckets:
                bucket.renew()
            self._flags.renew()
        self._works = []
        self._broken = None
        self._hears = False  # an exchange may have been begun, and given up before all was sent
        self._transport = transport
        self._strategy.connect(transport)

    def begin(self, scale: float, *, nothing: bool = False) -> None:
        """The next backward is the step's last: send each bucket as soon as it is full.

        Gradients are multiplied by `scale`, one over the step's weight: their sum is a mean. Where
        members have exchanged what they have to in another way, there are flags and `nothing` else.
        """
        self._nothing = nothing
        self._scale, self._hears, self._restarted = scale, True, False
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        self._works = []
        self._broken = None
        self._next, self.begun_s = len(self.buckets) if nothing else 0, None

    def restart(self) -> None:
        """Forget this member's gradients, to compute them again: none is sent before `send`."""
        self._hears, self._restarted = False, True
        self.take()

    def send(
        self,
        *,
        behind: bool = True,
        astray: torch.Tensor | float = 0.0,
        late: bool = False,
        weight: float = 0.0,
        moves: bool = False,
    ) -> None:
        """The last backward is over: send what it did not fill, or all where none ran; then flags.

        See `Flags.tell` for these; `weight` is that of this member's gradients.
        """
        if self._scale is None:
            raise InternalError("send() before begin()")
        for bucket in self.buckets[self._next :]:
            for i in sorted(bucket.missing):
                if bucket.parameters[i].grad is None:
                    bucket.slots[i].zero_()
                else:  # used by an earlier pass of this step only
                    self._fill(bucket, i, self._scale)
            self._send(bucket)
        for rows in self._rows if self._broken is None and not self._nothing else ():
            try:
                self._works.append(rows.start(self._transport, self._scale))
            except TransportError as error:
                self._broken = error
        if self._broken is None:
            self._flags.tell(
                behind=behind,
                astray=1.0 if self._restarted else astray,
                late=late,
                moves=moves,
                used=[p.grad is not None for b in self.buckets for p in b.parameters],
                measured=self._part(weight) if self._measures else (0.0, 0.0),
            )
            transport = self._transport
            if transport is not None and transport.size > 1:
                try:
                    self._works.append(transport.all_reduce(self._flags.message))
                except TransportError as error:
                    self._broken = error
        self._sent_scale, self._scale, self._hears = self._scale, None, False

    def collect(
        self, abandoned: Callable[[], bool], beside: Callable[[], float] | None = None
    ) -> Exchanged:
        """Wait for the exchange, then make the mean gradients the parameters' `.grad`.

        Own gradients are untouched where it is `astray`, or raises `TransportError`: the exchange
        broke, or was abandoned, or that is what `beside` raised, which gives the norm of gradients
        that travel another way.
        """
        if self._broken is not None:
            raise self._broken
        for b, work in enumerate(self._works):
            if work is not None:
                finish(work, abandoned)
                self._works[b] = None
        sparse_norm, sparse_sent = self._collect_rows(abandoned)
        others_norm = 0.0 if beside is None or self._strays() else beside()
        for bucket in () if self._nothing else self.buckets:
            self._strategy.finish(bucket)
        norms, (behind, astray, late, moves, used), measured = self._read()
        *sent, last = (
            sparse_sent,
            *(0 if self._nothing else self._strategy.bytes_sent(bucket) for bucket in self.buckets),
        )
        if self._transport is not None:
            last += self._transport.all_reduce_bytes(self._flags.bytes)
        norm = math.nan if astray else math.hypot(*norms, sparse_norm) * (not self._nothing)
        exchanged = Exchanged(
            norm=math.hypot(norm, others_norm),
            bytes_sent=sum(sent) + last,
            agreed=not behind,
            late=late,
            moves=moves,
            astray=astray,
            bytes_last=0 if astray else last,
            own=math.nan if astray else self._own_norm(),
        )
        if measured is not None and not astray:
            self.measured = noise_of(*measured, norm)
            self._flags.keep(self.measured or (math.nan, math.nan))
        for bucket, any_used in zip(self.buckets, used, strict=True) if not astray else ():
            _install(bucket, any_used, bucket.slots)
        for rows in self._rows if not astray else ():
            rows.install()
        return exchanged

    def _collect_rows(self, abandoned: Callable[[], bool]) -> tuple[float, int]:
        """The norm of sparse gradients, and the bytes that were sent of them."""
        if not self._rows or self._nothing or self._strays():
            return 0.0, 0
        norms, sent = zip(*(r.collect(self._transport, abandoned) for r in self._rows), strict=True)
        return math.hypot(*norms), sum(sent)

    def _strays(self) -> bool:
        """Whether a member has something to tell first; the flags have come."""
        return bool(self._flags.read(self._flags.message.tolist())[1])

    def _own_norm(self) -> float:
        """That of this member's own part of the sum; NaN where it is not this exchange's turn."""
        self._collected += 1
        alone = self._transport is None or self._transport.size == 1 or self._rows
        if alone or self._collected % _LOOKED_AT:
            return math.nan
        own = [p.grad for p in self._place if p.grad is not None]
        if not own or own[0].device.type != "cpu":  # a GPU would stand still
            return math.nan
        return float(torch.nn.utils.get_total_norm(own)) * abs(self._sent_scale)

    def _part(self, weight: float) -> tuple[torch.Tensor | float, float]:
        """w_i |g_i|^2 of this member, where w_i is its part of the step; and 1 if it has one."""
        scale = self._scale or 0.0
        part = weight * scale
        own = [p.grad for p in self._place if p.grad is not None]
        if part <= 0.0 or not own:
            return 0.0, 0.0
        norm = torch.nn.utils.get_total_norm(own).double() * scale
        return norm * norm / part, 1.0

    def _read(
        self,
    ) -> tuple[
        list[float],
        tuple[bool, bool, bool, bool, list[Sequence[float]]],
        tuple[float, float] | None,
    ]:
        """What arrived that is no gradient: each bucket's norm, and the flags.

        All of it in one transfer, however many buckets there are: a GPU stands still meanwhile.
        """
        norms = [torch.linalg.vector_norm(bucket.flat)[None] for bucket in self.buckets]
        told = torch.cat([part.double() for part in (*norms, self._flags.message)]).tolist()
        flags = told[len(norms) :]
        return told[: len(norms)], self._flags.read(flags), self._flags.measured(flags)

    def begin_fragment(
        self, buckets: Sequence[Bucket], moved: Sequence[Sequence[torch.Tensor]], scale: float
    ) -> None:
        """Between steps, begin to sum what has `moved`, times `scale`, in these buckets' places.

        All members begin the same ones; `finish_fragment` comes before anything else is begun.

        Args:
            buckets: Some of this exchange's.
            moved: Of each bucket one tensor a parameter; the caller's again once this returns.
            scale: Factors of all members add up to 1.

        Raises:
            TransportError: The connections are broken.
        """
        self._works = []
        for bucket, some in zip(buckets, moved, strict=True):
            for slot, one in zip(bucket.slots, some, strict=True):
                torch.mul(one, scale, out=slot)
            self._works.append(self._strategy.start(bucket))

    def finish_fragment(self, buckets: Sequence[Bucket], abandoned: Callable[[], bool]) -> int:
        """Wait for it: the buckets' `slots` have the sums then; returns the bytes sent.

        What encoding has lost of it counts until `commit`, and is taken back where that does not
        come. `TransportError`: the exchange broke, or was abandoned.
        """
        for b, work in enumerate(self._works):
            if work is not None:
                finish(work, abandoned)
                self._works[b] = None
        for bucket in buckets:
            self._strategy.finish(bucket)
        if self.residual is not None:
            self.residual.count()
        return sum(self._strategy.bytes_sent(bucket) for bucket in buckets)

    @property
    def under_way(self) -> bool:
        """Something travels; may be asked in any thread."""
        return any(work is not None for work in self._works)

    def arrived(self) -> bool:
        """Whether `collect` would not wait; `TransportError`: the exchange broke."""
        return all(work is None or work.wait(0.0) for work in self._works)

    def room(self) -> tuple[torch.Tensor, ...]:
        """Memory for `sums`, on the CPU: the system has given all of it, which takes a while."""
        return tuple(torch.empty_like(one, device="cpu").zero_() for one in self._messages())

    def sums(self, room: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies, in such memory, of the messages that `collect` has made the gradients."""
        return tuple(to.copy_(one) for to, one in zip(room, self._messages(), strict=True))

    def _messages(self) -> tuple[torch.Tensor, ...]:
        return self._flags.message, *(bucket.flat for bucket in self.buckets)

    def install_gradients(self, sums: Sequence[torch.Tensor]) -> None:
        """Make such copies the parameters' `.grad`; an exchange under way is not disturbed."""
        flags, *flats = sums
        numbers = flags.tolist()
        *_, used = self._flags.read(numbers)
        measured = self._flags.measured(numbers)
        self.measured = None if measured is None or math.isnan(measured[0]) else measured
        for bucket, any_used, flat in zip(self.buckets, used, flats, strict=True):
            _install(bucket, any_used, bucket.cut(flat.to(bucket.flat.device)))

    def clip(self, norm: float, limit: float) -> None:
        """Scale the mean gradients so that their global norm is at most `limit`.

        The factor is limit / (norm + 1e-6), as in `torch.nn.utils.clip_grad_norm_`.
        """
        factor = limit / (norm + 1e-6)
        if factor < 1.0:
            for bucket in self.buckets:
                bucket.flat.mul_(factor)
            for rows in self._rows:
                rows.clip(factor)

    def take(self) -> Gradients:
        """This member's own, which are then forgotten here; not between `begin` and `collect`."""
        taken = tuple(parameter.grad for parameter in self._names)
        for parameter in self._names:
            parameter.grad = None
        return taken

    def add(self, taken: Gradients) -> None:
        """Add to this member's own what was taken; it is this exchange's from now on."""
        for parameter, grad in zip(self._names, taken, strict=True):
            if parameter.grad is None or grad is None:
                parameter.grad = grad if parameter.grad is None else parameter.grad
            else:
                parameter.grad.add_(grad)

    def commit(self) -> None:
        """The step counts: what encoding has lost of it is kept."""
        if self.residual is not None:
            self.residual.commit()

    def clear(self) -> None:
        """Forget all gradients: the step is committed or given up."""
        self._scale, self._hears = None, False
        if self.residual is not None:
            self.residual.discard()
        for parameter in self._names:
            parameter.grad = None

    def _finished(self, parameter: nn.Parameter) -> None:
        """A backward pass has accumulated the gradient of `parameter`."""
        if self._refuses:
            raise self._not_own(parameter)
        if self._scale is None or not self._hears or parameter not in self._place:
            return
        b, i = self._place[parameter]
        bucket = self.buckets[b]
        if i not in bucket.missing:
            raise TaskError(
                f"the gradient of {bucket.names[i]!r} was computed twice in one backward pass",
                hint="use activation checkpointing with use_reentrant=False",
            )
        self._fill(bucket, i, self._scale)
        bucket.missing.discard(i)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next])

    def _not_own(self, parameter: nn.Parameter) -> TaskError:
        return TaskError(
            f"Task.loss made a gradient of {self._names[parameter]!r} itself, which would not be "
            "weighted like that of the loss it returns",
            hint="add the term to the loss, without backward(); or use torch.autograd.grad",
        )

    def _fill(self, bucket: Bucket, i: int, scale: float) -> None:
        """Put the scaled gradient of parameter `i` into its slot, unless it goes nowhere."""
        if self._broken is not None:
            return
        grad = bucket.parameters[i].grad
        if grad is None or grad.is_sparse:
            raise is_sparse(bucket.names[i])
        torch.mul(grad, scale, out=bucket.slots[i])

    def _send(self, bucket: Bucket) -> None:
        """Start the exchange of the next bucket; all members send them in the same order."""
        if self._next == 0:
            self.begun_s = self._clock.monotonic_s()
        self._next += 1
        if self._broken is None:
            try:
                self._works.append(self._strategy.start(bucket))
            except TransportError as error:
                self._broken = error


def noise_of(squares: float, members: float, norm: float) -> tuple[float, float] | None:
    """The variance v of a step's gradient, and the squared norm |G|^2 of what it is expected to be.

    Members have the parts w_i of a batch, with mean gradients g_i, and g is the mean of all. Then

        v = (sum_i w_i |g_i|^2 - |g|^2) / (N - 1),   |G|^2 = |g|^2 - v

    are right in the mean, for any parts. One of them may come out negative, in one step.

    Args:
        squares: sum_i w_i |g_i|^2.
        members: N, that have a part.
        norm: |g|.

    Returns:
        Both; None where nothing can be told: of one member, or of what is not finite.

    >>> noise_of(5.0, 2.0, 2.0), noise_of(5.0, 1.0, 2.0)
    ((1.0, 3.0), None)
    """
    if members < _PAIR or not math.isfinite(squares * norm):
        return None
    variance = (squares - norm**2) / (members - 1.0)
    return variance, norm**2 - variance


def _install(bucket: Bucket, used: Sequence[float], slots: Sequence[torch.Tensor]) -> None:
    """Each parameter that anyone has used has its slot as gradient, the others have none."""
    for parameter, slot, any_used in zip(bucket.parameters, slots, used, strict=True):
        parameter.grad = slot if any_used else None


def is_sparse(name: str) -> TaskError:
    """The refusal of this parameter's gradient."""
    return TaskError(
        f"the gradient of {name!r} is sparse; that goes with a sync.period of 1, lockstep and "
        "nn.Embedding(sparse=True) or nn.EmbeddingBag alone",
        hint="construct the embedding with sparse=False",
    )
