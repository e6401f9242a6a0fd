"""The sequence that a resumed member goes on with, where data, layout or batches have changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.checkpoint import Manifest, PartRecord
from raycloud.checkpoint.naming import part_name
from raycloud.control import ControlSettings
from raycloud.errors import CheckpointError, DataError
from raycloud.order import Layout, Ledger, Order, Position, Steps, lanes_of, lockstep_commits
from raycloud.worker.dataset import (
    LAYOUT,
    layout_of,
    layout_record,
    order_of,
    steps_of,
)
from tests.lockstep import job
from tests.tiers import examples

JOB = job(global_batch=8, micro_batch=2)
STEPS = Steps(samples=40, global_batch=8, micro_batch=2)


def laid_out(samples: int, *, global_batch: int = 8, micro_batch: int = 2) -> Layout:
    """Partitions of 5 rows; a data set that grows adds some behind the old ones."""
    lanes = lanes_of(global_batch, micro_batch)
    starts = [*range(0, samples, 5), samples]
    starts += [samples] * (-(len(starts) - 1) % lanes)  # empty ones, up to a multiple of the lanes
    return Layout(partitions=tuple(starts), lanes=lanes, run=global_batch // lanes, window=2)


def checkpoint(steps: Steps, step: int, layout: Layout | None = None) -> Manifest:
    """The manifest after `step` steps of a run of `steps`."""
    ledger = Ledger(samples=steps.samples)
    for epoch, samples in steps.later:
        ledger.grow(epoch, samples)
    for commit in lockstep_commits(
        steps, at=Position(), first_step=0, last_step=step, generation=0
    ):
        ledger.commit(commit)
    at = steps.position_after(step, Position())
    return manifest(step, at, ledger, layout)


def manifest(step: int, at: Position, ledger: Ledger, layout: Layout | None) -> Manifest:
    """Written and read again."""
    part = PartRecord(
        file=part_name(step, 0, 1),
        rank=0,
        replica=0,
        position=0,
        parts=1,
        bytes=8,
        sha256="0" * 64,
        tensors={},
    )
    made = Manifest(
        step=step,
        epoch=at.epoch,
        offset=at.offset,
        generation=0,
        samples_per_epoch=ledger.samples_in(at.epoch),
        job={},
        values={} if layout is None else {LAYOUT: layout_record(layout)},
        ledger=ledger.state(),
        parts=(part,),
        raycloud_version="0.1.0",
        torch_version="2.13.0",
    )
    return Manifest.from_bytes(made.to_bytes())


def test_a_new_run_has_all_there_is() -> None:
    assert steps_of(JOB, 40, None) == STEPS
    order = order_of(JOB, STEPS, laid_out(40), None)
    expected = Order(samples=40, seed=JOB.seed, layout=laid_out(40))
    assert order.ids(3, 0, 40).tolist() == expected.ids(3, 0, 40).tolist()


@pytest.mark.parametrize(("step", "epoch"), [(3, 1), (5, 1), (6, 2)])
def test_more_samples_are_in_the_epochs_that_begin_later(step: int, epoch: int) -> None:
    assert steps_of(JOB, 50, checkpoint(STEPS, step)).later == ((epoch, 50),)
    assert steps_of(JOB, 40, checkpoint(STEPS, step)) == STEPS


def test_growth_before_the_checkpoint_is_known() -> None:
    grown = STEPS.grown(1, 50)
    assert steps_of(JOB, 50, checkpoint(grown, 7)) == grown
    assert steps_of(JOB, 60, checkpoint(grown, 7)).later == ((1, 50), (2, 60))
    assert steps_of(JOB, 60, checkpoint(grown, 4)).later == ((1, 60),)


def test_fewer_samples_are_refused() -> None:
    kept = checkpoint(STEPS.grown(1, 50), 7)
    with pytest.raises(DataError, match="trained on 50 samples per epoch, the members see 49"):
        steps_of(JOB, 49, kept)


def test_a_larger_step_that_only_the_grown_data_fills() -> None:
    wider = job(global_batch=64, micro_batch=2, drop_last=True)
    steps = steps_of(wider, 100, checkpoint(STEPS, 3))
    assert steps.span(3, Position(offset=24)).epoch == 1
    with pytest.raises(DataError, match="too small"):
        steps_of(wider, 60, checkpoint(STEPS, 3))


@pytest.mark.parametrize("step", [3, 5, 7])
@pytest.mark.parametrize("samples", [40, 55])
def test_members_and_control_cut_the_same(step: int, samples: int) -> None:
    kept = checkpoint(STEPS, step)
    told = ControlSettings(
        min_workers=1,
        max_workers=1,
        capacity=1,
        global_batch=8,
        micro_batch=2,
        step=step,
        position=kept.position,
        ledger=kept.ledger,
    )
    assert told.steps(samples) == steps_of(JOB, samples, kept)


def test_an_epoch_in_progress_ends_in_the_layout_in_which_it_began() -> None:
    old, new = laid_out(40), laid_out(60, global_batch=16)
    wider = job(global_batch=16, micro_batch=2)
    kept = checkpoint(STEPS, 3, old)
    steps = steps_of(wider, 60, kept)
    order = order_of(wider, steps, new, kept)
    before = Order(samples=40, seed=wider.seed, layout=old)
    assert order.ids(0, 24, 40).tolist() == before.ids(0, 24, 40).tolist()
    after = Order(samples=60, seed=wider.seed, layout=new)
    assert order.ids(1, 0, 60).tolist() == after.ids(1, 0, 60).tolist()


def test_between_epochs_the_old_layout_is_not_asked_for() -> None:
    order = order_of(JOB, STEPS, laid_out(40), checkpoint(STEPS, 5))
    expected = Order(samples=40, seed=JOB.seed, layout=laid_out(40))
    assert order.ids(1, 0, 40).tolist() == expected.ids(1, 0, 40).tolist()


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the layout in the checkpoint of step 3 cannot be"):
        order_of(JOB, STEPS, laid_out(40), checkpoint(STEPS, 3, laid_out(45)))


def test_a_layout_comes_back_from_its_record() -> None:
    record = json.loads(json.dumps(layout_record(laid_out(41))))
    assert layout_of(record) == laid_out(41)
    assert layout_of(layout_record(None)) is None


@examples(60)
@given(
    st.integers(20, 50),
    st.lists(
        st.tuples(
            st.integers(1, 9),  # steps until the run is stopped
            st.sampled_from([0, 0, 1, 13]),  # samples more when it is resumed
            st.sampled_from([4, 8, 16]),  # its global batch then
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_a_run_resumed_with_more_data_takes_each_sample_of_each_epoch_once(
    samples: int,
    starts: list[tuple[int, int, int]],
    plain: bool,
) -> None:
    kept: Manifest | None = None
    ledger = Ledger(samples=samples)
    step, at, taken = 0, Position(), {}
    for more, added, global_batch in starts:
        samples += added
        asked = job(global_batch=global_batch, micro_batch=2)
        layout = None if plain else laid_out(samples, global_batch=global_batch)
        steps = steps_of(asked, samples, kept)
        order = order_of(asked, steps, layout, kept)
        if kept is None:
            ledger, layouts = Ledger(samples=samples), {0: layout}
        elif added:
            ledger.grow(at.next_epoch, samples)
        layouts[at.next_epoch] = layout
        for commit in lockstep_commits(
            steps, at=at, first_step=step, last_step=step + more, generation=0
        ):
            ledger.commit(commit)
        for span, _ in zip(steps.walk(step, at), range(more), strict=False):
            ids = order.ids(span.epoch, span.start, span.stop).tolist()
            taken.setdefault(span.epoch, []).extend(ids)
        step, at = step + more, steps.position_after(more, at)
        held = layouts[max(epoch for epoch in layouts if epoch <= at.epoch)]
        kept = manifest(step, at, ledger, held if at.offset else None)
    assert ledger.audit(through=at).exact
    assert sum(map(len, taken.values())) == ledger.committed_samples
    for epoch, ids in taken.items():
        assert len(set(ids)) == len(ids)
        if epoch < at.epoch:
            assert set(ids) == set(range(ledger.samples_in(epoch)))
