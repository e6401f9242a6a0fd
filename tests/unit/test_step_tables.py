"""Rows on servers, over real sockets: the single-process result, through deaths and codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

import raycloud
from raycloud.checkpoint import open_store
from raycloud.errors import TaskError, TransportError
from raycloud.net.stream import Place
from raycloud.order import Position
from raycloud.server.serving import Server, file_name
from raycloud.server.shard import Shard
from raycloud.step.collate import StepWork
from raycloud.step.commit import collect, commit
from raycloud.step.replica import Replica
from raycloud.step.servers import Connections
from raycloud.step.tables import LostRowsError, Tables
from tests.live import wait_for
from tests.lockstep import Fleet, job, never
from tests.looked import IDS, TABLE, Looked, reference

FEW = 12  # steps
OPEN: list[Tables] = []


class Served(Fleet):
    """Replicas whose tables are on servers; who joins says so to those."""

    def __init__(
        self,
        servers: Sequence[Server],
        shares: Sequence[int],
        copies: Sequence[Server] = (),
        **changes: Any,
    ) -> None:
        self.servers, self.generation, self.number = servers, 0, 0
        self.copies, self.others = copies, list[Sequence[Server]]()
        self.settings: dict[str, Any] = {"dropout": 0.0, **changes.pop("settings", {})}
        one = job(**{"servers": len(servers), "sync": {"bucket_bytes": 1024}, **changes})
        super().__init__(one, Looked(**self.settings), shares)

    def join(self, replicas: Sequence[Replica], shares: Sequence[int]) -> None:
        super().join(replicas, shares)
        self.generation += 1
        for replica in replicas:
            assert replica.tables is not None
            OPEN.append(replica.tables)
            replica.tables.serve(self.find, lambda: len(self.others))
        self.enter()

    def find(self, layout: int = 0, **_: Any) -> list[list[Any]]:
        """By shard, where its servers listen."""
        if layout:
            return [[one.place] for one in self.others[layout - 1]]
        return [
            [one.place, *(other.place for other in self.copies[at : at + 1])]
            for at, one in enumerate(self.servers)
        ]

    def enter(self) -> None:
        """All at once, as members do."""
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            meeting, said = Barrier(len(self.replicas)), dict[int, Sequence[float]]()

            def agree(rank: int, values: Sequence[float]) -> list[Sequence[float]]:
                said[rank] = values
                meeting.wait(10.0)
                found = [said[one] for one in sorted(said)]
                meeting.wait(10.0)  # before the next round
                return found

            entered = [
                threads.submit(one.tables.enter, self.generation, self.number, partial(agree, at))
                for at, one in enumerate(self.replicas)
                if one.tables is not None
            ]
            for one in entered:
                one.result()

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.number = number + 1
        return loss

    def rows(self) -> np.ndarray:
        tables = self.replicas[0].tables
        assert tables is not None
        with torch.no_grad():
            return tables.rows(TABLE, torch.from_numpy(IDS)).numpy()

    def apart(self, steps: int) -> float:
        """The largest difference from a single process."""
        state, table = reference(self.job, steps, **self.settings)
        own = dict(self.replicas[0].model.state_dict())
        assert own.keys() == state.keys()
        nets = max(float((own[name] - state[name]).abs().max()) for name in state)
        return max(nets, float(np.abs(self.rows() - table.numpy()).max()))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    made = [Server(at, 2, open_store(tmp_path), "127.0.0.1") for at in range(2)]
    yield made
    while OPEN:
        OPEN.pop().close()
    for one in made:
        one.close()


@pytest.mark.parametrize("shares", [[8], [5, 2, 1]], ids=str)
def test_any_members_give_the_single_process_result(
    servers: list[Server], shares: list[int]
) -> None:
    fleet = Served(servers, shares)
    for number in range(FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9
    counts = [one.shard.tables[TABLE].count for one in servers]
    assert min(counts) >= 5
    assert sum(counts) < len(IDS)  # only what a step has named


def test_without_clipping_nobody_asks_for_a_norm(servers: list[Server]) -> None:
    fleet = Served(servers, [4, 4], clip_norm=None)
    for number in range(FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9


@pytest.mark.parametrize("during", ["lane", "gradients", "after"])
def test_a_death_in_a_step_counts_it_once(servers: list[Server], during: str) -> None:
    fleet = Served(servers, [3, 3, 2])
    for number in range(4):
        fleet.step(number)
    fleet.lose(1, 4, during=during)
    fleet.number = 5
    for number in range(5, FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9


def test_a_step_that_only_the_dead_has_committed_is_made_again(servers: list[Server]) -> None:
    fleet = Served(servers, [4, 4])
    for number in range(4):
        fleet.step(number)
    before = fleet.rows()
    doomed, survivor = fleet.replicas
    assert doomed.tables is not None
    assert survivor.tables is not None
    fleet.compute(4)
    doomed.tables.scale = 1e-3
    doomed.tables._decide(4, 1e-3)
    fleet.hubs[0].cut("a member died")
    survivor.suspend()
    kept = survivor.kept
    assert kept is not None
    fleet.join([survivor], [8])
    assert (fleet.rows() == before).all()  # as of step 4, though it was committed
    span = fleet.span(4, fleet.position)
    left = [k for k in range(len(span.micro_batches)) if k not in kept.micro_batches]
    fleet.compute(4, adopted=[left])
    collect(survivor, 4, never)
    commit(survivor, StepWork(span=span, passes=()))
    fleet.position, fleet.number = fleet.steps.after(span), 5
    for number in range(5, FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9


@pytest.mark.parametrize("shares", [[4, 4], [8]], ids=str)
def test_a_server_that_dies_when_asked_for_its_norm_leaves_own_gradients_as_they_were(
    servers: list[Server], tmp_path: Path, shares: list[int]
) -> None:
    fleet = Served(servers, shares)
    for number in range(4):
        fleet.step(number)
    for replica in fleet.replicas:
        assert replica.tables is not None
        replica.tables.save(4)()
    fleet.compute(4)  # the servers have all of it, and so have the members of the others
    servers[0].close()
    for replica in fleet.replicas:
        with pytest.raises(TransportError):
            collect(replica, 4, never)
        replica.suspend()
    servers[0] = Server(0, 2, open_store(tmp_path), "127.0.0.1")
    fleet.join(fleet.replicas, shares)
    works = fleet.compute(4, adopted=[[] for _ in shares])
    for replica in fleet.replicas:
        collect(replica, 4, never)
    for replica, work in zip(fleet.replicas, works, strict=True):
        commit(replica, work)
    fleet.position, fleet.number = fleet.steps.after(works[0].span), 5
    for number in range(5, FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9


def test_what_is_kept_is_gone_on_from_by_any_number_of_servers(
    servers: list[Server], tmp_path: Path
) -> None:
    fleet = Served(servers, [4, 4])
    for number in range(5):
        fleet.step(number)
    tables = fleet.replicas[0].tables
    assert tables is not None
    tables.save(5)()
    kept = fleet.rows()
    assert {file_name(5, at, 2) for at in range(2)} <= set(open_store(tmp_path).names("step-"))
    fleet.step(5)
    assert (fleet.rows() != kept).any()
    fleet.generation, fleet.number = fleet.generation + 1, 5
    fleet.enter()  # they go back
    assert (fleet.rows() == kept).all()
    others = [Server(at, 3, open_store(tmp_path), "127.0.0.1") for at in range(3)]
    fleet.servers = others
    fleet.enter()
    assert (fleet.rows() == kept).all()
    for one in others:
        one.close()


def test_a_lost_server_is_told_and_its_rows_are_missed(
    servers: list[Server], tmp_path: Path
) -> None:
    fleet = Served(servers, [8])
    for number in range(3):
        fleet.step(number)
    servers[1].close()
    tables = fleet.replicas[0].tables
    assert tables is not None
    with pytest.raises(TransportError):
        fleet.step(3)
    assert fleet.replicas[0].kept is None
    fleet.servers = [servers[0], Server(1, 2, open_store(tmp_path), "127.0.0.1")]
    with pytest.raises(LostRowsError, match="0 whole sets of tables of step 3"):
        fleet.enter()
    fleet.servers[1].close()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_rows_gradients_travel_as_codes(servers: list[Server], codec: str) -> None:
    def sent(codec: str) -> tuple[int, np.ndarray]:
        fleet = Served(servers[:1], [8], sync={"codec": codec}, settings={"single": True})
        tables = fleet.replicas[0].tables
        assert tables is not None
        for number in range(2):
            fleet.step(number)
        return tables.take_bytes()[0], fleet.rows()

    dense, rows = sent("none")
    for one in servers:  # as they began
        one.shard = Shard()
    coded, near = sent(codec)
    assert coded < dense
    assert 0.0 < np.abs(near - rows).mean() < 0.05


def test_what_a_job_must_be_is_said() -> None:
    for changes, says in (
        ({}, "has no servers"),
        ({"servers": 1, "sync": {"period": 8}}, "makes rounds of steps"),
        ({"servers": 1, "elastic": {"backup_micro_batches": 2}}, "backup_micro_batches"),
    ):
        with pytest.raises(TaskError, match=says):
            Tables.of(Looked().model(), job(**changes), lambda: (0, 1))


def test_an_embedding_by_itself_says_where_it_works() -> None:
    one = raycloud.Embedding(4)
    with pytest.raises(RuntimeError, match=r"raycloud\.train"):
        one(torch.tensor([1]))
    for given, says in (({"width": 0}, "width is 0"), ({"lr": -1.0}, "lr is -1.0"),
                        ({"optimizer": "lamb"}, "it is one of"),
                        ({"dtype": torch.int8}, "dtype is")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            raycloud.Embedding(**{"width": 4, **given})
    assert list(one.parameters()) == []


def test_ids_of_another_type_are_refused(servers: list[Server]) -> None:
    fleet = Served(servers, [8])
    look: Any = fleet.replicas[0].model.look
    with pytest.raises(TypeError, match=r"torch\.int64"):
        look(torch.tensor([1.0]))


def test_strangers_and_senseless_words_do_no_harm(servers: list[Server]) -> None:
    fleet = Served(servers, [8])
    before = fleet.rows()
    asked = Connections(lambda: [[one.place] for one in servers])
    every = [name for shard in asked.meet() for name in shard]
    for header in (
        {"do": "nonsense"},
        {"do": ["read"]},
        {"do": "read", "table": "nobody's", "step": 0},
        {"do": "decide", "step": 7, "generation": 9, "scale": 1.0},
        {"do": "push", "step": 0, "generation": 1, "rank": 0, "tables": [["look", "zip"]]},
        {"do": "open", "spec": {"name": "look", "width": 9, "betas": [0.9, 0.9]}},
    ):
        with pytest.raises(TaskError, match="a server says"):
            asked.ask_each(every, header)
    asked.close()
    assert (fleet.rows() == before).all()
    fleet.step(0)
    assert fleet.apart(1) <= 1e-9


def test_who_is_lost_is_found_again_only_after_the_others_have_gone_on(
    servers: list[Server],
) -> None:
    """To find servers takes as long as one that is lost does not answer."""
    found = 0

    def find() -> list[list[Place | None]]:
        nonlocal found
        found += 1
        return [[one.place for one in servers]]

    asked = Connections(find)
    [every] = asked.meet()
    assert found == 1
    servers[0].close()
    asked.hang_up()  # as where another member has found out
    assert asked.meet() == [every]
    assert found == 1
    assert [asked.has(name) for name in every] == [False] + [True] * (len(every) - 1)
    assert asked.meet() == [every]
    assert found == 2
    asked.close()


def test_evaluation_makes_no_rows(servers: list[Server]) -> None:
    fleet = Served(servers, [8])
    fleet.rows()
    assert sum(one.shard.tables[TABLE].count for one in servers) == 0
    assert fleet.position == Position()


def lost_as_it_is_told(fleet: Served, server: Server) -> None:
    """A server ends while the first member tells it its part of step 3; all of it is computed."""
    first = fleet.replicas[0].tables
    assert first is not None
    push = first.push

    def lose() -> None:
        server.close()
        push()

    first.push = lose  # type: ignore[method-assign] # what happens just before it
    with pytest.raises(TransportError):
        fleet.compute(3)
    first.push = push  # type: ignore[method-assign]
    for replica in fleet.replicas:
        assert replica.kept is not None or replica is fleet.replicas[1]
        replica.suspend()
        replica.discard()  # what is kept, others in this test compute again


def test_a_copy_takes_over_and_what_comes_back_is_filled(
    servers: list[Server], tmp_path: Path
) -> None:
    def new(at: int) -> Server:
        return Server(at, 2, open_store(tmp_path), "127.0.0.1")

    copies = [new(0), new(1)]
    fleet = Served(servers, [5, 3], copies)
    for number in range(3):
        fleet.step(number)
    lost_as_it_is_told(fleet, servers[1])
    fleet.servers = [servers[0], new(1)]  # it is started again, and has nothing
    fleet.join(fleet.replicas, fleet.shares)
    for number in range(3, 6):
        fleet.step(number)
    filled = fleet.servers[1].shard
    wait_for("all words", lambda: filled.step == copies[1].shard.step == 6)
    assert dict(filled.arrays()).keys() == dict(copies[1].shard.arrays()).keys()
    for name, rows in filled.arrays():
        assert np.array_equal(rows, dict(copies[1].shard.arrays())[name])
    copies[1].close()
    with pytest.raises(TransportError):
        fleet.step(6)
    for replica in fleet.replicas:
        replica.discard()
    fleet.copies = [copies[0]]  # what was filled is all there is now
    fleet.join(fleet.replicas, fleet.shares)
    for number in range(6, FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9
    for one in (copies[0], fleet.servers[1]):
        one.close()


def test_a_server_that_some_do_not_reach_is_of_no_use_to_any(
    servers: list[Server], tmp_path: Path
) -> None:
    copies = [Server(at, 2, open_store(tmp_path), "127.0.0.1") for at in range(2)]
    fleet = Served(servers, [4, 4], copies)
    for number in range(3):
        fleet.step(number)
    whole = fleet.find
    lonely = fleet.replicas[0].tables
    assert lonely is not None
    lonely.serve(lambda: [[None, *places[1:]] for places in whole()])
    fleet.generation += 1
    fleet.enter()
    for number in range(3, FEW):
        fleet.step(number)
    assert fleet.apart(FEW) <= 1e-9
    assert {one.shard.step for one in servers} == {3}  # nobody has told them more
    wait_for("all words", lambda: {one.shard.step for one in copies} == {FEW})
    for one in copies:
        one.close()


def test_what_was_decided_is_told_again_but_not_to_who_has_no_rows(
    servers: list[Server], tmp_path: Path
) -> None:
    fleet = Served(servers, [8])
    tables = fleet.replicas[0].tables
    assert tables is not None
    fleet.step(0)
    tables.hang_up()  # the generation is given up before the next word
    fleet.generation += 1
    fleet.enter()
    assert {one.shard.step for one in servers} == {1}
    servers[1].close()
    fleet.servers = [servers[0], Server(1, 2, open_store(tmp_path), "127.0.0.1")]
    fleet.generation += 1
    with pytest.raises(LostRowsError, match="0 whole sets of tables of step 1"):
        fleet.enter()
    fleet.servers[1].close()


def test_only_a_whole_set_of_files_is_gone_on_from(servers: list[Server], tmp_path: Path) -> None:
    fleet, store = Served(servers, [8]), open_store(tmp_path)
    for number in range(3):
        fleet.step(number)
    tables = fleet.replicas[0].tables
    assert tables is not None
    strange = file_name(3, 1, 3)  # of a start with three shards, that was killed
    store.write(strange, [b"half"])
    tables.save(3)()
    assert not store.exists(strange)
    kept = fleet.rows()
    store.remove_all([file_name(3, 1, 2)])  # it was never written
    fresh = [Server(at, 2, store, "127.0.0.1") for at in range(2)]
    fleet.servers = fresh
    tables.serve(fleet.find)
    with pytest.raises(LostRowsError, match="0 whole sets"):
        fleet.enter()
    fleet.servers = servers  # who still have the rows
    tables.serve(fleet.find)
    fleet.enter()
    assert (fleet.rows() == kept).all()
    for one in fresh:
        one.close()


def test_what_is_kept_on_a_second_way_to_a_step_is_that_way_s(
    servers: list[Server], tmp_path: Path
) -> None:
    fleet = Served(servers, [8])
    tables = fleet.replicas[0].tables
    assert tables is not None

    def go(first: int, last: int) -> None:
        for number in range(first, last):
            fleet.step(number)

    go(0, 2)
    tables.save(2)()
    go(2, 4)
    tables.save(4)()
    first = fleet.rows()
    fleet.generation, fleet.number = fleet.generation + 1, 2
    fleet.enter()  # back
    tables.pass_over(2)  # the second way leaves it out
    tables.pass_over(3)
    second = fleet.rows()
    tables.save(4)()
    fleet.servers = [Server(at, 2, open_store(tmp_path), "127.0.0.1") for at in range(2)]
    fleet.number = 4
    fleet.enter()
    assert (fleet.rows() == second).all()
    assert (second != first).any()
    for one in fleet.servers:
        one.close()


def test_a_checkpoint_of_other_tables_is_no_lost_one(servers: list[Server], tmp_path: Path) -> None:
    fleet = Served(servers, [8])
    for number in range(2):
        fleet.step(number)
    tables = fleet.replicas[0].tables
    assert tables is not None
    tables.save(2)()
    others = [Server(at, 2, open_store(tmp_path), "127.0.0.1") for at in range(2)]
    single = Served(others, [8], settings={"single": True})
    single.number = 2
    fresh = [Server(at, 2, open_store(tmp_path), "127.0.0.1") for at in range(2)]
    wide: Any = single.replicas[0].model
    wide.look = raycloud.Embedding(5)
    changed = Tables.of(wide, single.job, lambda: (0, 1))
    assert changed is not None
    OPEN.append(changed)
    changed.serve(lambda: [[one.place] for one in fresh])
    with pytest.raises(TaskError, match="other tables"):
        changed.enter(5, 2, lambda values: [values])
    for one in (*others, *fresh):
        one.close()


def test_rows_move_to_another_number_of_servers(servers: list[Server], tmp_path: Path) -> None:
    """Two, three, one: they are filled while steps go on, and then asked in the others' place."""
    fleet, number = Served(servers, [5, 3]), 0
    tables = fleet.replicas[0].tables
    assert tables is not None

    def steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            fleet.step(number)
            number += 1

    steps(4)
    every = [servers]
    for count in (3, 1):
        store = open_store(tmp_path)
        every.append([Server(at, count, store, "127.0.0.1") for at in range(count)])
        fleet.others.append(every[-1])
        assert tables.due
        fleet.enter()  # in the midst of a generation
        steps(3)  # by the ones before, and told to the others
        assert all(one.busy for one in every[-2])
        wait_for("servers to be filled", lambda: tables.due)
        fleet.enter()
        assert not tables.due
        steps(3)
        wait_for("the others to be left", lambda: not any(one.busy for one in every[-2]))
        for one in every[-2]:
            one.close()
    assert fleet.apart(number) <= 1e-9
    assert every[-1][0].shard.tables[TABLE].count >= 15
    for one in every[-1]:
        one.close()


def test_servers_that_not_all_reach_are_done_without(servers: list[Server], tmp_path: Path) -> None:
    fleet = Served(servers, [5, 3])
    fleet.step(0)
    coming = [Server(at, 3, open_store(tmp_path), "127.0.0.1") for at in range(3)]
    fleet.others.append(coming)
    coming[1].close()
    fleet.generation += 1
    fleet.enter()
    for number in range(1, 6):
        fleet.step(number)
    assert fleet.apart(6) <= 1e-9
    assert all(one.busy for one in servers)
    for one in coming:
        one.close()
