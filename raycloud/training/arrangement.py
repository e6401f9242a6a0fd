"""The samples of a member, and which of them stands where in the sequence."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raycloud.data.provide import Prepared
from raycloud.errors import InternalError
from raycloud.events import DataPrepared
from raycloud.order import Layout, lanes_of
from raycloud.training.growth import LAYOUT, layout_of, order_of, position_of, steps_of
from raycloud.training.identity import DATA, check_identity, identity

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.data.index import Index
    from raycloud.data.samples import BlockSamples
    from raycloud.spec import Job
    from raycloud.task import Samples
    from raycloud.training.config import MemberConfig
    from raycloud.training.supply import Supply


class Arrangement:
    """Samples, laid out from where a checkpoint stands; they may grow.

    Args:
        job: What is asked.
        supply: The samples.
        manifest: The checkpoint; None at the beginning.

    Attributes:
        steps: How the sequence is cut, as it is known at the start.
        order: Which sample stands where, as it is known at the start.

    Raises:
        DataError: There are too few samples, or they are not those the checkpoint was trained on.
        CheckpointError: The checkpoint's layout cannot be used.
    """

    def __init__(self, job: Job, supply: Supply, manifest: Manifest | None) -> None:
        """Lay the samples out."""
        index = index_of(supply.train)
        begun = manifest if manifest is not None and manifest.step else None
        if begun is not None:
            stratified = job.data.stratify is not None
            check_identity(index, begun.values.get(DATA), stratified=stratified)
        self._job = job
        self.supply = supply
        self.steps = steps_of(job, len(supply.train), begun)
        layout = laid_out(job, index)
        self.order = order_of(job, self.steps, layout, begun)
        self._layouts = [(0, layout)]
        if begun is not None and begun.offset:  # that epoch ends as it began
            kept = layout_of(begun.values.get(LAYOUT))
            self._layouts = [(0, kept), (position_of(begun).next_epoch, layout)]

    def layout(self, epoch: int) -> Layout | None:
        """The layout of `epoch`; None where it has none."""
        return next(layout for first, layout in reversed(self._layouts) if first <= epoch)

    def extend(self, samples: Samples, epoch: int) -> Layout | None:
        """Lay grown samples out, which are there from `epoch` on."""
        layout = laid_out(self._job, index_of(samples))
        self._layouts.append((epoch, layout))
        return layout


def index_of(samples: Samples) -> Index | None:
    """The index of samples that lie in blocks; None for others."""
    index: Index | None = getattr(samples, "index", None)
    return index if hasattr(samples, "gather") else None


def laid_out(job: Job, index: Index | None) -> Layout | None:
    """How the job reads blocks: a step takes as many rows of every lane."""
    if index is None:
        return None
    lanes = lanes_of(job.global_batch, job.micro_batch)
    try:
        return Layout(
            partitions=index.partitions,
            lanes=lanes,
            run=job.global_batch // lanes,
            window=job.data.window,
        )
    except ValueError as error:
        raise InternalError(f"the data was prepared for another job: {error}") from error


def data_values(samples: Samples) -> dict[str, Any]:
    """What a checkpoint keeps to know the data again."""
    index = index_of(samples)
    return {} if index is None else {DATA: identity(index)}


def prepared_event(
    config: MemberConfig,
    split: str,
    prepared: Prepared,
    version: int = 0,
    *,
    waited_s: float = 0.0,
) -> DataPrepared:
    """What a member tells of a split that is ready."""
    index = prepared.index
    return DataPrepared(
        member=config.member,
        split=split,
        rows=index.rows,
        bytes=index.bytes,
        blocks=len(index.blocks),
        cached_blocks=prepared.cached_blocks,
        partitions=len(index.partitions) - 1,
        bad_rows=index.bad_rows,
        bad=tuple(f"{bad.file}, row {bad.row}: {bad.why}" for bad in index.bad),
        inputs=tuple(asdict(file) for file in index.inputs),
        files=len(index.inputs),
        seconds=prepared.seconds,
        read_s=prepared.read_s,
        version=version,
        price_per_gb_month=config.job.data.cache.price_per_gb_month,
        waited_s=waited_s,
    )


def grown(samples: BlockSamples, before: int) -> Prepared:
    """The same of training samples that have grown from `before` blocks on, beside the training.

    How long that took is not known here.
    """
    made = len(samples.index.blocks) - before
    return Prepared(
        index=samples.index, cached_blocks=before, made_blocks=made, seconds=0.0, read_s=0.0
    )
