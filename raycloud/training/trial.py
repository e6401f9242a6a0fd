"""Computing a little without effect: how fast a member is, and what its task does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raycloud.errors import TaskError
from raycloud.order import MicroBatch
from raycloud.training.again import trouble_of
from raycloud.training.calling import RaisedError
from raycloud.training.randomness import global_draws

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Position, Steps
    from raycloud.spec import Job
    from raycloud.training.collate import Collate
    from raycloud.training.replica import Replica


_MOST_TRIES = 5
_ENOUGH_S = 0.5
_WARM_UP_S = 2.0
_LEAST_SLOPE = 0.05  # of what one micro-batch takes


class Trial:
    """Tries a replica out on a few samples.

    Args:
        job: What is asked.
        replica: What computes.
        collate: Makes the batches.
        member: This member's number: members begin at different places.
        clock: For the seconds.
    """

    def __init__(
        self, job: Job, replica: Replica, collate: Collate, *, member: int, clock: Clock
    ) -> None:
        """Nothing is computed yet."""
        self._job = job
        self._replica = replica
        self._collate = collate
        self._member = member
        self._clock = clock
        self._past = 0  # places that nothing can be computed of

    def speed(self) -> tuple[float, float]:
        """Seconds of `T(b) = fixed_s + b * micro_batch_s` for b micro-batches: both of them.

        Raises:
            TaskError: The task's code raised, or drew from a global random generator.
        """
        job, (many, micro) = self._job, self._usual()
        if job.elastic.shares != "auto":
            return 0.0, self._seconds(1, micro)
        single_s = self._warm_seconds(1, micro)
        if self._replica.fuse == 1 or many == 1:
            return 0.0, single_s
        return _line(single_s, many, self._warm_seconds(many, micro))

    def joining_speed(self) -> tuple[float, float]:
        """As `speed`, but briefly: others wait for this member, and will see the rest with it.

        It goes by one micro-batch, once that is warm, and by a share, as `warm_up` computes it for
        the first time. That makes the line too steep, but not steeper than without fixed seconds.
        Where a share takes several passes each of them takes the fixed seconds.

        Raises:
            TaskError: As of `speed`.
        """
        usual, micro = self._usual()
        self._seconds(1, micro)
        single_s = self._seconds(1, micro)
        many, (fixed_s, micro_batch_s) = 1, (0.0, single_s)
        while (more := self._warms_up(fixed_s, micro_batch_s)) > many:
            many = more  # again where fewer than are possible were: alone, one takes far longer
            many_s = min(self._first(many), many * single_s)
            fixed_s, micro_batch_s = _line(single_s, many, many_s)
        if many == self._replica.fuse < usual:
            return 0.0, micro_batch_s + fixed_s / many
        return fixed_s, micro_batch_s

    def warm_up(self, fixed_s: float, micro_batch_s: float) -> None:
        """Compute a share, as much as one pass holds and two seconds allow, for the first time.

        Memory that a process has not touched before costs it time to be given, several times as
        much where its machine is a virtual one that had given it back to its host. In a step all
        others would wait for that. It shows what cannot be computed, too; what draws from where
        was looked at before, by this member or by the one whose place or process it has.

        Args:
            fixed_s: Seconds that a pass takes however many micro-batches it has.
            micro_batch_s: Seconds that each takes more.

        Raises:
            TaskError: The task's code raised.
        """
        self._first(self._warms_up(fixed_s, micro_batch_s))

    def last_of_an_epoch(self, steps: Steps, at: Position, left: int) -> None:
        """Compute the last micro-batch of an epoch where that has a single sample.

        Batch normalisation and losses that compare samples may raise on it. It would be found
        after an epoch.

        Args:
            steps: How epochs are cut.
            at: Where the sequence stands.
            left: Steps that are to be computed from there.

        Raises:
            TaskError: The task's code raised.
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
        many = min(self._usual()[0], self._replica.fuse)  # which are all in memory at once
        if fixed_s + many * micro_batch_s > _WARM_UP_S:
            many = max(1, int((_WARM_UP_S - fixed_s) / micro_batch_s))
        return many

    def _first(self, many: int) -> float:
        return self._seconds(many, self._usual()[1], watched=False)

    def _usual(self) -> tuple[int, int]:
        """Micro-batches of a share, where shares are equal, and samples of a micro-batch."""
        job, samples = self._job, self._collate.order.samples
        micro = min(job.micro_batch, samples)
        return max(1, min(job.micro_batches // job.elastic.max_workers, samples // micro)), micro

    def _warm_seconds(self, micro_batches: int, micro: int) -> float:
        """The least of some tries, after one that warms up for this size: others may be starting.

        Of a pass that takes long there are fewer.
        """
        self._seconds(micro_batches, micro)
        tried_s, least_s = 0.0, math.inf
        for _ in range(_MOST_TRIES):
            seconds = self._seconds(micro_batches, micro)
            tried_s, least_s = tried_s + seconds, min(least_s, seconds)
            if tried_s >= _ENOUGH_S:
                break
        return least_s

    def _seconds(self, micro_batches: int, micro: int, *, watched: bool = True) -> float:
        """Of one try. What nothing can be computed of is passed over, where it may be skipped."""
        errors, replica = self._job.errors, self._replica
        while True:
            group, size = self._places(micro_batches, micro), min(micro_batches, replica.fuse)
            try:
                return self._timed(group, size, watched=watched)
            except RaisedError as error:
                trouble = trouble_of(tuple(group), error)
                replica.discard()
                if trouble.memory and size > 1:
                    replica.fuse = size = size // 2
                    what = f"memory ran out: passes are of at most {size} micro-batches"
                    replica.notice(what, {"error": str(error)})
                elif errors.on_error == "stop" or self._past > errors.most_skipped:
                    raise
                else:
                    self._past += micro_batches

    def _timed(self, group: list[MicroBatch], size: int, *, watched: bool) -> float:
        before = global_draws()
        passes = self._collate.passes(group, size)
        if watched and global_draws() != before:
            raise TaskError(
                "reading samples or Task.batch drew from a global random generator, so that "
                "results would depend on timing",
                hint="draw from the `rng` that Task.batch is given",
            )
        began_s = self._clock.monotonic_s()
        for one in passes:
            self._replica.try_out(one)
        return self._clock.monotonic_s() - began_s

    def _places(self, micro_batches: int, micro: int) -> list[MicroBatch]:
        """Micro-batches of epoch 0: of one lane, where there are lanes, so that little is read.

        Those at the same place of different steps are of the same lane.
        """
        job, order = self._job, self._collate.order
        samples = order.samples
        first, stride = 0, micro
        if order.lanes_in(0) and micro_batches * job.global_batch <= samples:
            first = self._member % job.micro_batches * micro
            stride = job.global_batch
        whole = samples // stride * stride
        starts = [(first + (i + self._past) * stride) % whole for i in range(micro_batches)]
        return [
            MicroBatch(index=i, epoch=0, start=start, stop=start + micro)
            for i, start in enumerate(starts)
        ]


def _line(single_s: float, many: int, many_s: float) -> tuple[float, float]:
    """The line through what one micro-batch takes and what several take: fixed, and for each."""
    micro_batch_s = max((many_s - single_s) / (many - 1), _LEAST_SLOPE * single_s)
    return max(single_s - micro_batch_s, 0.0), micro_batch_s
