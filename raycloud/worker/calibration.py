"""Calibration: a member computes a little without effect, to learn its speed and what fuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raycloud.errors import TaskError
from raycloud.order import MicroBatch
from raycloud.step.compute import failed_pass
from raycloud.step.contract import RaisedError
from raycloud.step.device import PassMemory, pass_room_bytes, peak_bytes
from raycloud.step.forward import Fusing
from raycloud.step.randomness import global_draws
from raycloud.worker.usage import sustained_s

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Position, Steps
    from raycloud.spec import Job
    from raycloud.step.collate import Collate, Pass
    from raycloud.step.replica import Replica
    from raycloud.sync.gradients import Gradients

_Found = TypeVar("_Found")
_MOST_TRIES = 5
_ENOUGH_S = 0.5
_WARM_UP_S = 2.0
_UNKNOWN = 2  # workers, where any number may come
_SOUGHT_S = 4.0  # at most, for the largest pass, where nothing waits for it
_MOMENTS = 2  # numbers that an optimizer makes of a gradient's, in its first step
_FEW = 3  # sizes of passes, by which a line is known
_LEAP = 4  # times as large as what was tried the next one is, at most
_LEAST_SLOPE = 0.05  # of what one micro-batch takes
_COMPARED = 4  # micro-batches, or all of a step: of fewer the same number may count by chance
_HINT = (
    "if the loss is a mean over some of the samples or tokens (ignore_index, padding), let "
    "Task.weight return how many count. No weight makes a loss a mean that compares the samples of "
    "a batch (contrastive): micro_batch then sets what is compared"
)


class Calibration:
    """Tries a replica out on a few samples; `member` says where in the sequence.

    Its seconds are those of work that goes on, where a `quota` of cores would let a short try pass.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        collate: Collate,
        *,
        member: int,
        clock: Clock,
        quota: float = 0.0,
    ) -> None:
        self._job, self._replica, self._collate = job, replica, collate
        self._member, self._clock, self._quota = member, clock, quota
        samples = collate.order.samples
        self._micro = min(job.micro_batch, samples)  # samples of a micro-batch
        most = job.most_workers
        if job.elastic.max_workers == "auto":  # nobody knows how many
            most = max(_UNKNOWN, job.elastic.min_workers)
        share = min(job.micro_batches // most, samples // self._micro)
        self._usual = max(1, share)  # micro-batches of a share, where shares are equal
        self.memory: PassMemory | None = None  # of passes, once that is known
        self.largest = 0  # micro-batches of a pass that memory holds, once that is known
        self._past = 0  # places that nothing can be computed of
        self._largest = 1  # pass
        self.collate_s = math.inf  # of the batch of a micro-batch: the least of all that were made
        self._took_s: dict[int, list[float]] = {}  # by micro-batches; the first of each warmed up

    def compare(self) -> None:
        """Find out whether a pass of several micro-batches is what they are one by one.

        It is only where the loss is a mean, over what `Task.weight` says, and where batches may be
        joined, if `Task.batch` draws. Then the sum of weight * loss over micro-batches, and that of
        its gradients, is the same but for rounding. Members look at different samples where they
        read different ones, and what one has seen holds for all. Raises as `speed` does.
        """
        most = max(_COMPARED, min(self._usual, _MOST_TRIES + 1))  # `speed` would compute these
        count = min(most, self._job.micro_batches, self._collate.order.samples // self._micro)
        if count > 1 and self._replica.fuse > 1:
            self.find_memory(most=1)  # so that a first pass of several is none too large
            count = min(count, self.largest or count)
        if count > 1 and self._replica.fuse > 1:
            self._despite(count, self._compare)

    def find_memory(self, *, most: int | None = None, thorough: bool = False) -> None:
        """Find the largest pass that memory holds; a run has no larger ones.

        Passes of one, two and four micro-batches say by their peaks what a larger one takes. None
        is computed that is not expected to fit, so that on a CPU the system, which nobody can
        catch, has no reason to end a process. On a GPU one that does not fit ends what is sought.

        Args:
            most: No larger passes than this; None: what a step may have.
            thorough: Go on, within 4 s, up to the size that is found, whatever a step has.
        """
        replica, began_s = self._replica, self._clock.monotonic_s()
        every = max(1, self._collate.order.samples // self._micro)
        limit = 1 if replica.fuse == 1 else min(every, most or replica.fuse)
        peaks: dict[int, int] = {}
        room_bytes, budget_s = self._pass_room_bytes(), _SOUGHT_S if thorough else _WARM_UP_S
        if self._largest == 1:  # the first pass of all takes what later ones find there
            self._take_peak(1, {})
        size, before = 1, 0
        while size > before:
            self._take_peak(size, peaks)
            if size not in peaks:  # nothing tells, or memory ran out
                break
            self.memory = PassMemory.fitted(peaks)
            self.largest = max(self._largest, self.memory.largest(room_bytes, every))
            if not thorough and (self.largest >= limit or len(peaks) == _FEW):
                break
            leap = 2 if len(peaks) < _FEW else _LEAP
            goal = self.largest if thorough and limit > 1 else min(limit, self.largest)
            took_s = self._clock.monotonic_s() - began_s
            size, before = min(leap * size, goal), size
            if took_s * (1 + size / sum(peaks)) > budget_s:
                break
        if self.largest and most is None:
            self._hold(self.largest)

    def passes(self) -> dict[str, Any]:
        """What a member tells of its passes' memory: see `MemberReady`."""
        if not self.largest or self.memory is None:
            return {}
        return {
            "pass_samples": self.largest * self._micro,
            "pass_tried": self.memory.tried * self._micro,
            "sample_bytes": round(self.memory.micro_batch_bytes / self._micro),
        }

    def _hold(self, largest: int) -> None:
        replica, memory = self._replica, self.memory
        if largest < replica.fuse and memory is not None:
            what = f"memory holds passes of at most {largest} micro-batches: "
            what += "none is larger, and a larger share is computed in several"
            told = {"was": replica.fuse, "micro_batch_bytes": round(memory.micro_batch_bytes)}
            replica.notice(what, told)
        replica.forward.size.hold(largest)

    def _pass_room_bytes(self) -> int:
        """Without what the optimizer is going to take in its first step."""
        replica, reserved = self._replica, self._job.resources.worker.memory_bytes
        device = next(replica.model.parameters()).device
        state = getattr(replica.optimizer, "state", None)
        coming = 0 if state else _MOMENTS * replica.trained.bytes
        return max(0, pass_room_bytes(device, reserved) - coming)

    def _take_peak(self, size: int, peaks: dict[int, int]) -> None:
        """Add the bytes of a pass of so many, if they are told and it can be computed."""
        device = next(self._replica.model.parameters()).device
        group = self._places(size)
        try:
            found = peak_bytes(device, lambda: self._timed(group, size, watched=False))
        except RaisedError as error:
            trouble = failed_pass(tuple(group), error)
            self._replica.discard()
            if trouble.memory and peaks:
                self.largest = max(peaks)  # the limit itself
            return  # what else there is `speed` meets, and says
        if found is not None:
            peaks[size] = max(found, 1)

    def _compare(self, group: list[MicroBatch], size: int) -> None:
        replica, collate = self._replica, self._collate
        apart, together = GradientSum(), GradientSum()
        took_s = self._took_s[1] = []
        for one in group:
            took_s.append(self._timed([one], 1, keep=apart.add))
            if replica.fuse == 1:  # it draws, or changes buffers
                return
        if size == 1:  # there is no memory for more
            return
        collate.joins, why = True, ""
        try:
            self._took_s[len(group)] = [self._timed(group, size, keep=together.add)]
        except RaisedError as error:
            if failed_pass(tuple(group), error).memory:
                raise
            replica.discard()
            why = f"computing several at once: {error.message}"
        else:
            unlike, limit = apart.difference(together), tolerance(together.dtypes | self._dtypes())
            if together.passes == len(group):
                why = "Task.batch draws, and returns more than tensors with a row for each sample"
            elif unlike > limit:
                why = "the loss of several is not the weighted mean of their losses, or its "
                why += f"gradient is not: they differ by {unlike:.1e}, and rounding explains "
                why += f"{limit:.1e}"
        fusing = Fusing.NEVER if why else Fusing.JOINED if collate.draws else Fusing.COLLATED
        collate.joins = fusing is Fusing.JOINED
        replica.may_fuse(fusing)
        if why:
            what = f"micro-batches are computed one by one, not fused: {why}"
            replica.notice(what, {"hint": _HINT})

    def _dtypes(self) -> set[torch.dtype]:
        found = {p.dtype for p in self._replica.model.parameters() if p.requires_grad}
        if self._job.precision == "bf16":
            found.add(torch.bfloat16)
        on_gpu = any(p.is_cuda for p in self._replica.model.parameters())
        if on_gpu and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            found.add(torch.float16)  # TF32 has as many digits
        return found

    def end(self) -> None:
        """All was tried: passes are at first no larger than those here."""
        self._replica.forward.size.begin(self._largest)

    def speed(self) -> tuple[float, float]:
        """Seconds of `T(b) = fixed_s + b * micro_batch_s` for b micro-batches: both of them.

        Raises:
            TaskError: The task's code raised, or drew from a global random generator.
        """
        if self._job.elastic.shares != "auto":
            return 0.0, min(self._took_s.get(1) or [self._seconds(1)])
        single_s = self._warm_seconds(1)
        if self._replica.fuse == 1 or self._usual == 1:
            return 0.0, single_s
        return _line(single_s, self._usual, self._warm_seconds(self._usual))

    def joining_speed(self) -> tuple[float, float]:
        """As `speed`, but briefly: others wait for this member, and will see the rest with it.

        It goes by one micro-batch, once that is warm, and by a share, as `warm_up` computes it for
        the first time. That makes the line too steep, but not steeper than without fixed seconds.
        Where a share takes several passes each of them takes the fixed seconds.
        """
        self._seconds(1)
        single_s = self._seconds(1)
        many, (fixed_s, micro_batch_s) = 1, (0.0, single_s)
        while (more := self._warms_up(fixed_s, micro_batch_s)) > many:
            many = more  # again where fewer than are possible were: alone, one takes far longer
            many_s = min(self._seconds(many, watched=False), many * single_s)
            fixed_s, micro_batch_s = _line(single_s, many, many_s)
        if many == self._replica.fuse < self._usual:
            return 0.0, micro_batch_s + fixed_s / many
        return fixed_s, micro_batch_s

    def warm_up(self, fixed_s: float, micro_batch_s: float) -> None:
        """Compute a share, as much as one pass holds and two seconds allow, for the first time.

        Memory that a process has not touched before costs it time to be given, several times as
        much where its machine is a virtual one that had given it back to its host. In a step all
        others would wait for that. It also shows what cannot be computed. The seconds are those of
        `speed`, and it raises the same.
        """
        self._seconds(self._warms_up(fixed_s, micro_batch_s), watched=False)

    def last_of_an_epoch(self, steps: Steps, at: Position, left: int) -> None:
        """Compute the last micro-batch of an epoch where that has a single sample.

        Batch normalisation and losses that compare samples may raise on it, after an epoch: a
        `TaskError`. `left` steps are to be computed from `at` on.
        """
        samples, micro = steps.samples_in(at.epoch), self._job.micro_batch
        cut_off = steps.drop_last or steps.until_epoch(at.epoch + 1, at) > left
        if cut_off or micro == 1 or samples % micro != 1 or self._job.errors.on_error == "skip":
            return
        alone = MicroBatch(index=0, epoch=at.epoch, start=samples - 1, stop=samples)
        try:
            self._timed([alone], 1, watched=False)
        except RaisedError as error:
            self._replica.discard()
            raise TaskError(
                f"the last micro-batch of an epoch has 1 sample (of {samples}, micro_batch is "
                f"{micro}), and there {error.message}",
                hint="leave it out with drop_last: true, or choose another micro_batch: batch "
                "normalisation needs more than one value per channel",
            ) from error

    def _warms_up(self, fixed_s: float, micro_batch_s: float) -> int:
        """As how many micro-batches `warm_up` computes of such a speed."""
        many = min(self._usual, self._replica.fuse)  # which are all in memory at once
        if fixed_s + many * micro_batch_s > _WARM_UP_S:
            many = max(1, int((_WARM_UP_S - fixed_s) / micro_batch_s))
        return many

    def _warm_seconds(self, micro_batches: int) -> float:
        """The least of some tries, fewer if slow, after one that warms up."""
        took_s = self._took_s.setdefault(micro_batches, [])
        while len(took_s) <= 1 or (len(took_s) <= _MOST_TRIES and sum(took_s[1:]) < _ENOUGH_S):
            took_s.append(self._seconds(micro_batches))
        return min(took_s[1:])

    def _seconds(self, micro_batches: int, *, watched: bool = True) -> float:
        return self._despite(micro_batches, partial(self._timed, watched=watched))

    def _despite(
        self, micro_batches: int, compute: Callable[[list[MicroBatch], int], _Found]
    ) -> _Found:
        """What nothing can be computed of is passed over, where it may be skipped."""
        errors, replica = self._job.errors, self._replica
        while True:
            group, size = self._places(micro_batches), min(micro_batches, replica.fuse)
            try:
                return compute(group, size)
            except RaisedError as error:
                trouble = failed_pass(tuple(group), error)
                replica.discard()
                if trouble.memory and size > 1:
                    replica.fuse = size = size // 2
                    what = f"memory ran out: passes are of at most {size} micro-batches"
                    replica.notice(what, {"error": str(error)})
                elif errors.on_error == "stop" or self._past > errors.most_skipped:
                    raise
                else:
                    self._past += micro_batches

    def _timed(
        self,
        group: list[MicroBatch],
        size: int,
        *,
        watched: bool = True,
        keep: Callable[[Pass, torch.Tensor, Gradients], None] | None = None,
    ) -> float:
        before, cpu_s = global_draws(), self._clock.cpu_s()
        passes = self._collate.passes(group, size)
        made_s = sum(one.read_s + one.collate_s for one in passes)
        made_s = sustained_s(made_s, self._clock.cpu_s() - cpu_s, self._quota)
        self.collate_s = min(self.collate_s, made_s / len(group))
        if watched and global_draws() != before:
            raise TaskError(
                "reading samples or Task.batch drew from a global random generator, of torch, "
                "numpy or Python, so that results would depend on timing",
                hint="draw from the `rng` that Task.batch is given",
            )
        began_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        for one in passes:
            self._replica.try_out(one, keep)
            self._largest = max(self._largest, len(one.micro_batches))
        took_s = self._clock.monotonic_s() - began_s
        return sustained_s(took_s, self._clock.cpu_s() - cpu_s, self._quota)

    def _places(self, micro_batches: int) -> list[MicroBatch]:
        """Micro-batches of epoch 0: of one lane, where there are lanes, so that little is read.

        Those at the same place of different steps are of the same lane.
        """
        job, order, micro = self._job, self._collate.order, self._micro
        samples, first, stride = order.samples, 0, micro
        if order.lanes_in(0) and micro_batches * job.global_batch <= samples:
            first = self._member % job.micro_batches * micro
            stride = job.global_batch
        whole = samples // stride * stride
        starts = [(first + (i + self._past) * stride) % whole for i in range(micro_batches)]
        return [
            MicroBatch(index=i, epoch=0, start=start, stop=start + micro)
            for i, start in enumerate(starts)
        ]


class GradientSum:
    """Weighted losses and gradients of passes, added up; `dtypes` are those of the losses."""

    def __init__(self) -> None:
        self.passes = 0
        self.dtypes: set[torch.dtype] = set()
        self._weight = self._loss = 0.0
        self._losses = self._norms = 0.0  # sums of the absolute values, and of the norms
        self._gradients: dict[int, torch.Tensor] = {}

    def add(self, one: Pass, loss: torch.Tensor, gradients: Gradients) -> None:
        """Add a pass: what weighs nothing is not computed in a step, and its loss may be 0/0."""
        self.passes += 1
        self.dtypes.add(loss.dtype)
        if one.weight == 0.0:
            return
        self._weight += one.weight
        self._loss += float(loss) * one.weight
        self._losses += abs(float(loss)) * one.weight
        found = {i: g.to_dense() for i, g in enumerate(gradients) if g is not None}
        self._norms += _norm(found.values())
        for i, gradient in found.items():
            if i in self._gradients:
                self._gradients[i] += gradient
            else:
                self._gradients[i] = gradient

    def difference(self, other: GradientSum) -> float:
        """How far the other sum is from this one, relative to what was added up here.

        The largest of what weights, losses and all gradients together differ by. Of the latter it
        is their norm over the sum of the passes' norms, since those may cancel out. A parameter
        alone says nothing: its gradient may be nothing but rounding (a bias before a softmax).
        """
        zero, ours, theirs = torch.zeros(()), self._gradients, other._gradients
        apart = [ours.get(i, zero) - theirs.get(i, zero) for i in ours.keys() | theirs.keys()]
        far = [
            (abs(self._weight - other._weight), self._weight),
            (abs(self._loss - other._loss), self._losses),
            (_norm(apart), self._norms),
        ]
        if not all(math.isfinite(value) for pair in far for value in pair):
            return math.inf
        return max(d / whole if whole else (math.inf if d else 0.0) for d, whole in far)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in tensors))


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """How far two ways of computing the same loss and gradients may differ by rounding alone.

    A stored value is off by up to u, half of the dtype's `eps`, relative to itself; the norm of
    many, whose errors have no sign in common, by a few u: 8 here, for two ways. Sums are made in
    float32 at least, and one of n values is off by about sqrt(n) u of that: 2**10 here, for a
    million values (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, 2.8).
    What it has to be told from is larger: where a micro-batch counts 1 in 1,000 of its targets
    more than another, gradients differ by about 1e-3.

    >>> f"{tolerance([torch.float64]):.0e} {tolerance([torch.float32]):.0e}"
    '1e-13 6e-05'
    >>> f"{tolerance([torch.float32, torch.bfloat16]):.0e}"
    '3e-02'
    """
    stored = max(torch.finfo(dtype).eps / 2 for dtype in dtypes)
    summed = min(stored, torch.finfo(torch.float32).eps / 2)
    return 8 * stored + 2**10 * summed


def _line(single_s: float, many: int, many_s: float) -> tuple[float, float]:
    """The line through what one micro-batch takes and what several take: fixed, and for each."""
    micro_batch_s = max((many_s - single_s) / (many - 1), _LEAST_SLOPE * single_s)
    return max(single_s - micro_batch_s, 0.0), micro_batch_s
