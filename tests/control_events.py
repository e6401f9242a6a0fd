"""Events as control hears them: what a test does not ask about has a plain value."""

from __future__ import annotations

from raycloud import events as e
from raycloud.order import Position


def ready(member: int, *, samples: int = 100, micro_batch_s: float = 0.1) -> e.MemberReady:
    return e.MemberReady(
        member=member,
        samples=samples,
        parameters=1,
        state_bytes=1,
        gradient_bytes=1,
        fixed_s=0.0,
        micro_batch_s=micro_batch_s,
        node=f"node-{member}",
    )


def committed(
    member: int,
    first: int,
    last: int,
    *,
    generation: int,
    at: Position,
    computed: int,
    micro_batches: int = 1,
    compute_s: float = 1.0,
    exchange_s: float = 0.0,
    bytes_last: int = 0,
) -> e.StepsCommitted:
    """A report of the steps from `first` to before `last`, which end at `at`."""
    return e.StepsCommitted(
        member=member,
        generation=generation,
        first_step=first,
        last_step=last,
        epoch=at.epoch,
        offset=at.offset,
        loss=1.0,
        weight=1.0,
        samples=micro_batches,
        micro_batches=micro_batches,
        computed=computed,
        grad_norm=1.0,
        learning_rate=1.0,
        wall_s=1.0,
        compute_s=compute_s,
        data_s=0.0,
        exchange_s=exchange_s,
        cpu_s=1.0,
        bytes_sent=0,
        bytes_dense=0,
        bytes_last=bytes_last,
    )


def part(member: int, step: int, *, generation: int = 0, replica: int = -1) -> e.PartWritten:
    return e.PartWritten(
        member=member,
        step=step,
        part={"file": f"{member}-{step}"},
        blocked_s=0.0,
        write_s=0.0,
        generation=generation,
        replica=replica,
    )


def published(step: int) -> e.CheckpointPublished:
    return e.CheckpointPublished(step=step, path="p", state_bytes=1, write_s=0.0)


def stop(reason: str = "asked") -> e.StopRequested:
    return e.StopRequested(reason=reason)
