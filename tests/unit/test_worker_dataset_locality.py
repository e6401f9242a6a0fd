"""Micro-batches go to the replicas whose nodes hold what they read, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from raycloud.clock import SystemClock
from raycloud.data.index import Block, Index, Provided
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady
from raycloud.net.lane import Lane
from raycloud.net.rendezvous import Rendezvous
from raycloud.order import Layout, Order, Position, Steps, assign
from raycloud.step import feed
from raycloud.step.feed import Held, Piece, Schedule
from raycloud.task import Splits, Task
from raycloud.worker.dataset import block_layout, lane_bytes
from raycloud.worker.member import Meeting, Member, MemberConfig
from raycloud.worker.transition import agreed
from tests.blocks import SEEN, BlockTask, Here, asked, write_points
from tests.loopback import Loopback
from tests.sockets import gloo_members, together

LANES, ROWS, BYTES = 4, 8, 1000  # rows and bytes of a partition
POLL_S = 30.0


def layout(lanes_each: int = 2) -> Layout:
    starts = tuple(range(0, LANES * lanes_each * ROWS + 1, ROWS))
    return Layout(partitions=starts, lanes=LANES, run=2, window=2)


def order_of(at: Layout) -> Order:
    return Order(samples=at.samples, seed=5, layout=at)


def index_of(at: Layout, nodes_of_lane: Sequence[Sequence[str]]) -> Index:
    """A block for each partition, on the nodes of its lane."""
    order, nodes = order_of(at), {}
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


def table(found: Held) -> list[list[float]]:
    return [list(row) for row in found]


def test_lanes_go_to_the_replica_on_the_node_that_holds_them() -> None:
    index = index_of(layout(), ["b", "a", "a", "b"])
    found = lane_bytes(index, order_of(layout()), ("a", "b"))
    assert table(found) == [[0, 2000], [2000, 0], [2000, 0], [0, 2000]]
    assert owners((4, 4), found) == [[2, 3, 4, 5], [0, 1, 6, 7]]
    assert owners((4, 4), lane_bytes(index, order_of(layout()), ("b", "a"))) == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]


def test_ranks_of_one_node_share_what_it_holds() -> None:
    index = index_of(layout(), ["b", "a", "a", "ab"])
    found = lane_bytes(index, order_of(layout()), ("a", "b", "a"))
    assert table(found) == [[0, 2000, 0], [2000, 0, 2000], [2000, 0, 2000], [2000, 2000, 2000]]
    assert owners((2, 4, 2), found)[1] == [0, 1, 6, 7]


def test_a_block_counts_for_each_partition_that_it_lies_in() -> None:
    one = Layout(partitions=(0, 4, 10), lanes=2, run=1, window=1)
    blocks = (
        Block(key="1", rows=5, bytes=500, nodes=("a",)),
        Block(key="2", rows=0, bytes=7, nodes=("a", "b")),
        Block(key="3", rows=5, bytes=1000, nodes=("b", "elsewhere")),
    )
    order = order_of(one)
    found = lane_bytes(Index(blocks=blocks, partitions=one.partitions), order, ("a", "b"))
    first = next(lane for lane in (0, 1) if order.lane_partitions(0, lane).tolist() == [0])
    assert found[first] == pytest.approx((400, 0))
    assert found[1 - first] == pytest.approx((100, 1000))


@pytest.mark.parametrize("nodes", [(), ("a", "a"), ("a", ""), ("a",)])
def test_on_one_node_or_unknown_ones_the_deal_is_contiguous(nodes: tuple[str, ...]) -> None:
    index = index_of(layout(), ["b", "a", "a", "b"])
    found = lane_bytes(index, order_of(layout()), nodes)
    assert owners((5, 3), found) == [[0, 1, 2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("there", ["", "ab"])
def test_where_all_nodes_hold_the_same_the_deal_is_contiguous(there: str) -> None:
    found = lane_bytes(index_of(layout(), [there] * LANES), order_of(layout()), ("a", "b"))
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
        assert lane_bytes(index, order, ("a", "b")) == ()


def test_lanes_are_those_of_the_newest_layout() -> None:
    small, large = layout(), layout(3)
    begun = Order(samples=17, seed=5).extended(3, small.samples, small)
    order = begun.extended(3, large.samples, large)
    found = lane_bytes(index_of(large, ["b", "a", "a", "b"]), order, ("a", "b"))
    assert table(found) == [[0, 3000], [3000, 0], [3000, 0], [0, 3000]]


def test_what_is_dealt_is_computed_once() -> None:
    found = lane_bytes(index_of(layout(), ["b", "a", "a", "b"]), order_of(layout()), ("a", "b"))
    made = Schedule(Piece(step=0, generation=0, shares=(4, 4)), found)
    made.add(Piece(step=40, generation=1, shares=(6, 2)))
    spans = Steps(samples=19, global_batch=8, micro_batch=1).walk(0, Position())
    with patch.object(feed, "assign", wraps=assign) as counted:
        for span in [next(spans) for _ in range(80)]:
            every = [m for rank in (0, 1) for m in made.micro_batches(span, rank)]
            assert sorted(m.index for m in every) == list(range(span.samples))
    assert counted.call_count == 4  # two pieces, full and short steps


def test_members_that_disagree_take_what_rank_0_says() -> None:
    own: list[Held] = [((1, 2, 3.5), (4, 5, 6)), ((0, 0, 0), (9, 9, 9)), ((7, 0, 0), (0, 7, 0))]
    with gloo_members(3) as members:
        calls = [partial(agreed, mine, Lane(to)) for mine, to in zip(own, members, strict=True)]
        assert together(calls) == [own[0]] * 3
    assert agreed((), Lane(Loopback(2).members[0])) == ()  # nothing to agree on


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


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here it shares a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    SEEN.clear()


def last(member: Member, kind: type[Event]) -> Event:
    """Wait for such an event."""
    while True:
        found = member.poll(POLL_S)
        assert found, f"nothing happened for {POLL_S} s"
        for event in found:
            assert not isinstance(event, MemberFailed), event
            if isinstance(event, kind):
                return event


def test_members_compute_the_lanes_that_lie_on_their_nodes(tmp_path: Path) -> None:
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
        # The second member has heard otherwise: what it deals by must not be its own.
        providers[rank].nodes = ("a", "b") if rank == 0 else ("b", "a")
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
    rendezvous = Rendezvous("127.0.0.1", SystemClock())
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
    assert providers[0].provided is not None
    index = providers[0].provided.train.index
    order = Order(samples=index.rows, seed=mine.seed, layout=block_layout(mine, index))
    found = assign((4, 4), 8, lane_bytes(index, order, nodes))
    assert found != assign((4, 4), 8)
    full = order.ids(0, 0, 160).reshape(10, 8, 2)
    tail = order.ids(0, 160, 163)
    computed = [set(SEEN[str(rank)]) for rank in (0, 1)]
    assert not computed[0] & computed[1]
    assert computed[0] | computed[1] == set(range(163))
    for rank in (0, 1):
        assert computed[rank] - set(tail) == set(np.ravel(full[:, found.of(rank)]))
