"""The sequence that a resumed member goes on with, where data, layout or batches have changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.checkpoint import Manifest, PartRecord
from raycloud.checkpoint.naming import part_name
from raycloud.control import ControlSettings
from raycloud.data import samples as samples_module
from raycloud.data.index import Block, Index
from raycloud.data.provider import Provided
from raycloud.data.samples import BlockSamples
from raycloud.errors import CheckpointError, DataError
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady
from raycloud.net.lane import Lane
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.order import (
    Layout,
    Ledger,
    Order,
    Position,
    Steps,
    assign,
    lanes_of,
    lockstep_commits,
)
from raycloud.recovery.rendezvous import Meeting
from raycloud.step import feed
from raycloud.step.feed import Held, Piece, Schedule
from raycloud.task import Splits, Task
from raycloud.worker.context import MemberConfig
from raycloud.worker.dataset import (
    LAYOUT,
    DataSet,
    block_layout,
    lane_bytes,
    layout_of,
    layout_record,
    order_of,
    steps_of,
)
from raycloud.worker.member import Member
from raycloud.worker.transition import gathered
from tests.blocks import SEEN, BlockTask, Here, asked, write_points
from tests.lockstep import job
from tests.loopback import Loopback
from tests.sockets import gloo_members, together
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


@examples(30)
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


LANES, ROWS, BYTES = 4, 8, 1000  # rows and bytes of a partition
POLL_S = 30.0


def layout(lanes_each: int = 2) -> Layout:
    starts = tuple(range(0, LANES * lanes_each * ROWS + 1, ROWS))
    return Layout(partitions=starts, lanes=LANES, run=2, window=2)


def order_at(at: Layout) -> Order:
    return Order(samples=at.samples, seed=5, layout=at)


def index_of(at: Layout, nodes_of_lane: Sequence[Sequence[str]]) -> Index:
    """A block for each partition, on the nodes of its lane."""
    order, nodes = order_at(at), {}
    for lane, there in enumerate(nodes_of_lane):
        nodes.update(dict.fromkeys(order.lane_partitions(0, lane).tolist(), tuple(there)))
    blocks = tuple(Block(key=str(p), rows=ROWS, bytes=BYTES, nodes=nodes[p]) for p in sorted(nodes))
    return Index(blocks=blocks, partitions=at.partitions)


def owners(shares: tuple[int, ...], found: Held, samples: int = 8) -> list[list[int]]:
    """The micro-batches of each rank in a step of so many samples, two a lane."""
    steps = Steps(samples=samples, global_batch=8, micro_batch=1)
    made = Schedule(Piece(step=0, generation=0, shares=shares), found)
    span = steps.span(0, Position())
    return [[m.index for m in made.micro_batches(span, rank)] for rank in range(len(shares))]


def held(index: Index, order: Order, nodes: Sequence[str]) -> Held:
    """As all members gather it."""
    return tuple(zip(*(lane_bytes(index, order, node) for node in nodes), strict=True))


def table(found: Held) -> list[list[float]]:
    return [list(row) for row in found]


def test_lanes_go_to_the_replica_on_the_node_that_holds_them() -> None:
    index = index_of(layout(), ["b", "a", "a", "b"])
    found = held(index, order_at(layout()), ("a", "b"))
    assert table(found) == [[0, 2000], [2000, 0], [2000, 0], [0, 2000]]
    assert owners((4, 4), found) == [[2, 3, 4, 5], [0, 1, 6, 7]]
    assert owners((4, 4), held(index, order_at(layout()), ("b", "a"))) == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]


def test_ranks_of_one_node_share_what_it_holds() -> None:
    index = index_of(layout(), ["b", "a", "a", "ab"])
    found = held(index, order_at(layout()), ("a", "b", "a"))
    assert table(found) == [[0, 2000, 0], [2000, 0, 2000], [2000, 0, 2000], [2000, 2000, 2000]]
    assert owners((2, 4, 2), found)[1] == [0, 1, 6, 7]


def test_a_block_counts_for_each_partition_that_it_lies_in() -> None:
    one = Layout(partitions=(0, 4, 10), lanes=2, run=1, window=1)
    blocks = (
        Block(key="1", rows=5, bytes=500, nodes=("a",)),
        Block(key="2", rows=0, bytes=7, nodes=("a", "b")),
        Block(key="3", rows=5, bytes=1000, nodes=("b", "elsewhere")),
    )
    order = order_at(one)
    found = held(Index(blocks=blocks, partitions=one.partitions), order, ("a", "b"))
    first = next(lane for lane in (0, 1) if order.lane_partitions(0, lane).tolist() == [0])
    assert found[first] == pytest.approx((400, 0))
    assert found[1 - first] == pytest.approx((100, 1000))


@pytest.mark.parametrize("nodes", [(), ("a", "a"), ("a", ""), ("a",)])
def test_on_one_node_or_unknown_ones_nobody_is_preferred(nodes: tuple[str, ...]) -> None:
    assert data_set(["b", "a", "a", "b"]).lane_bytes(nodes, 0) == ()


def data_set(nodes_of_lane: Sequence[Sequence[str]], shares: str = "auto") -> DataSet:
    """Over blocks that come from elsewhere."""
    index = index_of(layout(), nodes_of_lane)
    table = pa.table({"x": range(ROWS)})
    train = BlockSamples(index, lambda _: table, lambda _: {})
    made = DataSet.__new__(DataSet)
    made.data, made.order = Provided(train=train, held_out=None), order_at(layout())
    made._job = job(elastic={"shares": shares})
    return made


def test_what_a_member_has_copied_counts_as_well() -> None:
    one = data_set(["b", "a", "c", "c"])
    assert one.lane_bytes(("a", "b"), 0) == (0, 2000, 0, 0)
    order = one.order
    one.data.train.gather(order.lane_partitions(0, 2)[:1] * ROWS)  # a row of its first block
    assert one.lane_bytes(("a", "b"), 0) == (0, 2000, 1000, 0)
    assert one.lane_bytes(("a", "b"), 1) == (2000, 0, 1000, 0)
    fixed = data_set(["b", "a", "c", "c"], "equal")  # a resumed run deals like the first
    fixed.data.train.gather(order.lane_partitions(0, 2)[:1] * ROWS)
    assert fixed.lane_bytes(("a", "b"), 0) == (0, 2000, 0, 0)


@pytest.mark.parametrize(("member", "first"), [(0, 0), (1, 2)])
def test_who_is_idle_copies_whole_lanes(
    member: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once they would be opened in any order."""
    monkeypatch.setattr(samples_module, "_COPIERS", 1)
    one, over = data_set([""] * LANES), threading.Event()

    def idle() -> bool | None:
        if enough := len(one.data.train.opened) == 2:
            over.set()
        return not enough or None

    one.copy_while(idle, member)
    assert over.wait(POLL_S)
    copied = [0.0] * LANES
    copied[first] = 2000.0
    assert one.lane_bytes(("a", "b"), 0) == tuple(copied)


@pytest.mark.parametrize("there", ["", "ab"])
def test_where_all_nodes_hold_the_same_the_deal_is_contiguous(there: str) -> None:
    found = held(index_of(layout(), [there] * LANES), order_at(layout()), ("a", "b"))
    assert len(found) == LANES
    assert owners((5, 3), found) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert owners((5, 3), found, samples=3) == [[0, 1], [2]]


def test_without_lanes_nobody_is_preferred() -> None:
    at = layout()
    index = index_of(at, ["b", "a", "a", "b"])
    for order in (
        Order(samples=at.samples, seed=5),
        Order(samples=at.samples, seed=5, shuffle=False, layout=at),
    ):
        assert held(index, order, ("a", "b")) == ()


def test_lanes_are_those_of_the_newest_layout() -> None:
    small, large = layout(), layout(3)
    begun = Order(samples=17, seed=5).extended(3, small.samples, small)
    order = begun.extended(3, large.samples, large)
    found = held(index_of(large, ["b", "a", "a", "b"]), order, ("a", "b"))
    assert table(found) == [[0, 3000], [3000, 0], [3000, 0], [0, 3000]]


def test_with_other_shares_ranks_keep_their_lanes() -> None:
    """Contiguous runs would give the one in the middle others, though its share stays as it is."""
    nobody = held(index_of(layout(), [""] * LANES), order_at(layout()), ("a", "b", "c"))
    made = Schedule(Piece(step=0, generation=0, shares=(4, 2, 2)), nobody)
    made.add(Piece(step=1, generation=1, shares=(2, 2, 4)))
    made.add(Piece(step=2, generation=2, shares=(3.5, 2.5, 2)))
    spans = islice(Steps(samples=800, global_batch=8, micro_batch=1).walk(0, Position()), 18)
    dealt = [[[m.index for m in made.micro_batches(one, r)] for r in range(3)] for one in spans]
    assert dealt[0] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert dealt[1] == [[0, 1], [4, 5], [2, 3, 6, 7]]
    assert {tuple(map(tuple, step)) for step in dealt[2:]} == {
        ((0, 1, 2, 3), (4, 5), (6, 7)),
        ((0, 1, 2), (3, 4, 5), (6, 7)),
    }


def test_changes_of_shares_that_come_again_take_no_more_memory() -> None:
    nobody = held(index_of(layout(), [""] * LANES), order_at(layout()), ("a", "b"))
    made = Schedule(Piece(step=0, generation=0, shares=(4, 4)), nobody)
    for step in range(1, 200):
        made.add(Piece(step=step, generation=step, shares=(6, 2) if step % 2 else (4, 4)))
    made.micro_batches(Steps(samples=8, global_batch=8, micro_batch=1).span(199, Position()), 0)
    assert len({id(one) for one in made._held_in}) <= 3


def test_what_is_dealt_is_computed_once() -> None:
    found = held(index_of(layout(), ["b", "a", "a", "b"]), order_at(layout()), ("a", "b"))
    made = Schedule(Piece(step=0, generation=0, shares=(4, 4)), found)
    made.add(Piece(step=40, generation=1, shares=(6, 2)))
    spans = Steps(samples=19, global_batch=8, micro_batch=1).walk(0, Position())
    with patch.object(feed, "assign", wraps=assign) as counted:
        for span in [next(spans) for _ in range(80)]:
            every = [m for rank in (0, 1) for m in made.micro_batches(span, rank)]
            assert sorted(m.index for m in every) == list(range(span.samples))
    assert counted.call_count == 6  # two pieces: as a whole, and full and short steps


def test_members_deal_by_what_each_says_of_its_own() -> None:
    own = [(1.0, 2.0), (3.5, 4.0), (5.0, 6.0)]
    with gloo_members(3) as members:
        calls = [partial(gathered, mine, Lane(to)) for mine, to in zip(own, members, strict=True)]
        assert together(calls) == [((1.0, 3.5, 5.0), (2.0, 4.0, 6.0))] * 3
    assert gathered((), Lane(Loopback(2).members[0])) == ()  # nothing to tell


# ---- two members over blocks


class Elsewhere(Here):
    """What is prepared here, as if its two blocks lay on one of `nodes` each."""

    nodes: tuple[str, str] = ("a", "b")

    def provide(self, task: Task, splits: Splits) -> Provided:
        found = super().provide(task, splits)
        index = found.train.index
        assert len(index.blocks) == 2
        pairs = zip(index.blocks, self.nodes, strict=True)
        blocks = tuple(replace(block, nodes=(node,)) for block, node in pairs)
        found.train.index = replace(index, blocks=blocks)
        return found


def last(member: Member, kind: type[Event]) -> Event:
    """Wait for such an event."""
    while True:
        found = member.poll(POLL_S)
        assert found, f"nothing happened for {POLL_S} s"
        for event in found:
            assert not isinstance(event, MemberFailed), event
            if isinstance(event, kind):
                return event


def test_members_compute_the_lanes_that_lie_on_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockSamples, "opened", frozenset())  # nobody has tried any here
    files = tmp_path / "points"
    files.mkdir()
    write_points(files / "a.parquet", 0, 80)
    first = Here(asked(files), tmp_path / "cache")
    task = BlockTask()
    first.provide(task, task.data(str(files)))
    write_points(files / "b.parquet", 80, 83)  # files of different versions share no block
    nodes, members, providers = ("b", "a"), [], []
    for rank, node in enumerate(nodes):
        mine = asked(files, steps=11, settings={"tag": str(rank), "dropout": 0.0})
        providers.append(Elsewhere(mine, tmp_path / "cache", first.inputs()))
        # The second member has heard otherwise: of the other's blocks it must not go by that.
        providers[rank].nodes = ("a", "b") if rank == 0 else ("a", "a")
        config = MemberConfig(
            member=rank,
            node=node,
            address="127.0.0.1",
            job=mine,
            task=mine.task,  # type: ignore[arg-type]
            checkpoints=str(tmp_path / "checkpoints"),
        )
        members.append(Member(config, provider=providers[rank]))
        last(members[rank], MemberReady)
    SEEN.clear()
    rendezvous = Rendezvous("127.0.0.1")
    for rank, member in enumerate(members):
        meeting = Meeting(
            place=rendezvous.place,
            generation=0,
            rank=rank,
            members=(0, 1),
            shares=(4, 4),
            nodes=nodes,
        )
        member.form(meeting)
    for member in members:
        last(member, MemberDone)
    rendezvous.close()
    heard = [one.provided.train.index for one in providers if one.provided is not None]
    index = heard[0]
    order = Order(samples=index.rows, seed=mine.seed, layout=block_layout(mine, index))
    told = [lane_bytes(one, order, node) for one, node in zip(heard, nodes, strict=True)]
    found = assign((4, 4), 8, tuple(zip(*told, strict=True)))
    assert found != assign((4, 4), 8, held(heard[1], order, nodes))
    assert found != assign((4, 4), 8)
    full = order.ids(0, 0, 160).reshape(10, 8, 2)
    tail = order.ids(0, 160, 163)
    computed = [set(SEEN[str(rank)]) for rank in (0, 1)]
    assert not computed[0] & computed[1]
    assert computed[0] | computed[1] == set(range(163))
    for rank in (0, 1):
        assert computed[rank] - set(tail) == set(np.ravel(full[:, found.of(rank)]))
