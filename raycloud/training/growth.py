"""The sequence of a member's samples, where the data has grown since the checkpoint it starts from.

Control computes the same sizes from the checkpoint's ledger: see `ControlSettings.steps`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from raycloud.errors import CheckpointError, DataError
from raycloud.order import EpochSizes, Layout, Order, Position, Steps
from raycloud.step.contract import cut

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.spec import Job

LAYOUT = "layout"  # its name among a checkpoint's values


def steps_of(job: Job, samples: int, manifest: Manifest | None) -> Steps:
    """How the sequence is cut into steps by a member that sees `samples` samples.

    Samples that the checkpoint does not know of are in all epochs that begin where it stands, or
    after it.

    Raises:
        DataError: There are fewer samples than the checkpoint was trained on, or too few for a
            step.
    """
    if manifest is None or not manifest.step:
        return cut(job, samples)
    sizes = EpochSizes.from_state(manifest.ledger)
    if samples < sizes.most:
        raise DataError(
            f"the data has changed: the checkpoint was trained on {sizes.most} samples per epoch, "
            f"the members see {samples}",
            hint="bring back what is missing from data.path, or start a new run: without --resume, "
            "in another --run-dir",
        )
    sizes = sizes.grown(position_of(manifest).next_epoch, samples)
    return replace(cut(job, samples), samples=sizes.samples, later=sizes.later)


def order_of(job: Job, steps: Steps, layout: Layout | None, manifest: Manifest | None) -> Order:
    """Which sample stands where, from the checkpoint's position on.

    An epoch that the checkpoint has begun ends as it began, whatever has become of the data, the
    batch sizes or the layout since; `layout` holds for those that begin later.

    Args:
        job: What is asked.
        steps: Of `steps_of`.
        layout: Of all samples that there are now; None where they have none.
        manifest: The checkpoint; None at the beginning.

    Raises:
        CheckpointError: Its layout is not one of the epoch it has begun.
    """
    at = Position() if manifest is None else position_of(manifest)
    seed, shuffle, most = job.seed, job.data.shuffle, steps.sizes.most
    if manifest is None or not at.offset:
        return Order(samples=most, seed=seed, shuffle=shuffle, layout=layout)
    samples = steps.samples_in(at.epoch)
    try:
        kept = layout_of(manifest.values.get(LAYOUT))
        begun = Order(samples=samples, seed=seed, shuffle=shuffle, layout=kept)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the layout in the checkpoint of step {manifest.step} cannot be used: {error}",
            hint="resume from another checkpoint",
        ) from error
    if (samples, kept) == (most, layout):
        return begun
    return begun.extended(at.next_epoch, most, layout)


def position_of(manifest: Manifest) -> Position:
    """Where the sequence stands in a checkpoint."""
    return Position(epoch=manifest.epoch, offset=manifest.offset)


def layout_record(layout: Layout | None) -> dict[str, Any] | None:
    """A layout as plain values; for a checkpoint.

    >>> layout_record(Layout(partitions=(0, 4, 8), lanes=2, run=2, window=1))
    {'partitions': [0, 4, 8], 'lanes': 2, 'run': 2, 'window': 1}
    """
    if layout is None:
        return None
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return {**values, "partitions": list(layout.partitions)}


def layout_of(record: dict[str, Any] | None) -> Layout | None:
    """The layout whose `layout_record` this is."""
    if record is None:
        return None
    return Layout(**{**record, "partitions": tuple(record["partitions"])})
