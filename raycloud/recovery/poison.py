"""Poison batches: micro-batches that end whoever computes them, told from faults of the machine.

A process that ends says nothing. But what it was to compute is dealt to others, in the same step;
where those are lost as well, and it is still the same micro-batch that nobody has, it is not the
machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raycloud.errors import TaskError
from raycloud.step.collate import PartialStep
from raycloud.step.compute import described, skipped

if TYPE_CHECKING:
    from raycloud.order import MicroBatch
    from raycloud.step.collate import Collate
    from raycloud.step.feed import Adopted
    from raycloud.step.replica import Replica

_BEFORE_SKIPPING = 2  # losses: one that was no micro-batch's fault costs a few samples
_BEFORE_STOPPING = 3  # here it would cost the run
_NOBODY = -1


class Suspects:
    """What a member knows of the losses in the present step, in a job that stops, or skips.

    A micro-batch is suspect once so many are lost that were to compute it.
    """

    def __init__(self, on_error: str) -> None:
        self._most = _BEFORE_SKIPPING if on_error == "skip" else _BEFORE_STOPPING
        self._step = -1
        self._members: tuple[int, ...] = ()
        self._losses: Counter[int] = Counter()
        self._dealt: dict[int, int] = {}  # micro-batch: who was to compute it, in the last meeting

    def meet(
        self, members: tuple[int, ...], idle: Sequence[int] = (), *, planned: bool
    ) -> tuple[int, ...]:
        """These meet now; returns who was lost of those that met before and were not `idle`."""
        gone = tuple(sorted(set(self._members) - set(members) - set(idle)))
        self._members = members
        return () if planned else gone

    def found(
        self,
        step: int,
        missing: Sequence[int],
        gone: Sequence[int],
        owners: Mapping[int, int] | None = None,
    ) -> tuple[int, ...]:
        """Which micro-batches of `step` are suspect, of those `missing` that nobody has.

        `gone` were lost since the last meeting. `owners` are the members that were to compute what
        was dealt in none; None: those that are left have computed all that was theirs.
        """
        if step != self._step:
            self._step, self._dealt = step, {}
            self._losses.clear()
        for k in missing:
            if gone and self._dealt.get(k, (owners or {}).get(k, gone[0])) in gone:
                self._losses[k] += 1
        # As long as this meeting may break, nobody has any; with nobody lost they are as ever.
        self._dealt = dict.fromkeys(missing, _NOBODY) if gone else {}
        return tuple(k for k in missing if self._losses[k] >= self._most)

    @property
    def pressing(self) -> bool:
        """Whether micro-batches of the step become suspect if one more member is lost with them.

        It may be the memory they took that ended those: so each is computed alone now.
        """
        return any(losses >= self._most - 1 for losses in self._losses.values())

    def deal(self, adopted: Adopted) -> None:
        """What each rank of those that have met computes of the step, beside what it has kept."""
        for member, some in zip(self._members, adopted, strict=True):
            self._dealt |= dict.fromkeys(some, member)


def leave_out(
    replica: Replica, step: int, some: Sequence[MicroBatch], collate: Collate, *, tells: bool
) -> None:
    """Nobody computes these: one member `tells` so, in the exchange of the step.

    Raises:
        TaskError: The job does not skip any, or no more.
    """
    where = "; ".join(described(one, step, collate) for one in some)
    errors, before = replica.errors, skipped(replica.history.skips)
    if errors.on_error == "stop" or before + len(some) > errors.most_skipped:
        raise TaskError(
            f"each worker that computed it was lost: {where}",
            hint="look at these samples, and at what the workers' logs say last: if they were "
            "killed for lack of memory, though in the end each micro-batch was computed alone, "
            "give them more or make micro_batch smaller; errors.on_error "
            f"skip leaves out errors.most_skipped = {errors.most_skipped} micro-batches",
        )
    if not tells:
        return
    if replica.kept is None:
        replica.stage()
    kept = replica.kept or PartialStep(step=step)
    indices = [one.index for one in some]
    both = tuple(sorted({*kept.micro_batches, *indices}))
    replica.kept = replace(
        kept,
        micro_batches=both,
        skipped=(*kept.skipped, *indices),
        rows=kept.rows + collate.row_sum(some),
    )
    ids = [i for one in some for i in collate.ids(one)]
    replica.notice(
        f"skipped, since each worker that computed it was lost: {where}",
        {"step": step, "ids": ids},
    )
