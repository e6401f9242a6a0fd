"""What a step is predicted to cost: seconds and bytes, from measured speeds and a measured link."""

from __future__ import annotations

from dataclasses import dataclass

_BACKWARD = 2 / 3  # of a micro-batch's seconds: backward costs about twice the forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step costs if nothing changes.

    Attributes:
        step_s: Seconds from commit to commit. Without a link rate: of the computing alone.
        samples_per_s: Samples committed per second at that rate.
        compute_s: Seconds of computing of the worker which ends last.
        exchange_s: Seconds of the exchange on its own; None where no link rate was measured.
        bytes_per_step: Bytes each member sends per step.
    """

    step_s: float
    samples_per_s: float
    compute_s: float
    exchange_s: float | None
    bytes_per_step: int


def exposed_seconds(
    exchange_s: float, *, last_micro_batch_s: float, bucket_bytes: int, gradient_bytes: int
) -> float:
    """Seconds by which an exchange lengthens the step, when it overlaps with the last backward.

    The assumption: buckets leave one after another while the last micro-batch of the slowest worker
    runs backward, which takes 2/3 of its seconds; computing is not slowed down by it; and the last
    bucket, of the fraction bucket_bytes / gradient_bytes, leaves only when the backward has ended:

        exposed = max(exchange_s - 2/3 * last_micro_batch_s, exchange_s * last bucket's fraction).

    >>> exposed_seconds(1.0, last_micro_batch_s=0.75, bucket_bytes=1, gradient_bytes=10)
    0.5
    >>> exposed_seconds(1.0, last_micro_batch_s=60.0, bucket_bytes=1, gradient_bytes=10)
    0.1
    """
    if gradient_bytes == 0:
        return exchange_s
    last = min(1.0, bucket_bytes / gradient_bytes)
    return max(exchange_s - _BACKWARD * last_micro_batch_s, exchange_s * last)
