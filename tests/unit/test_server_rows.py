"""Rows by id: each found again, begun by its id alone, and updated as torch's optimizers do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycloud.errors import InternalError
from raycloud.server.decode import decoded
from raycloud.server.rows import IdIndex, Table
from raycloud.sync.codecs import CODECS
from raycloud.sync.tables import TableSpec, initial, shard_of, summed

ANY_ID = st.integers(-(2**63), 2**63 - 1)


def spec(**given: object) -> TableSpec:
    told = {"name": "users", "width": 3, "rate": 0.1, "dtype": "float64", "spread": 0.5, **given}
    return TableSpec(**told)  # type: ignore[arg-type] # of all kinds


@given(st.lists(st.lists(ANY_ID, unique=True, max_size=40), max_size=8))
def test_an_index_numbers_each_id_once(batches: list[list[int]]) -> None:
    index, known = IdIndex(), dict[int, int]()
    for batch in batches:
        ids = np.array(batch, np.int64)
        found = index.find(ids)
        assert found.tolist() == [known.get(one, -1) for one in batch]
        new = ids[found < 0]
        for one, number in zip(new.tolist(), index.add(new).tolist(), strict=True):
            known[one] = number
    every = np.array([*known], np.int64)
    assert index.find(every).tolist() == [*known.values()] == [*range(len(known))]
    assert index.ids[: index.count].tolist() == [*known]


def test_an_index_of_many_ids_that_lie_together() -> None:
    index = IdIndex()
    ids = np.arange(-50_000, 50_000)
    index.add(ids[::2])
    index.add(ids[1::2])
    assert (index.find(ids[::2]) == np.arange(50_000)).all()
    assert (index.find(ids[1::2]) == np.arange(50_000, 100_000)).all()
    assert (index.find(ids + 200_000) == -1).all()


def test_rows_begin_by_their_id_alone_and_evenly_spread() -> None:
    ids = np.arange(20_000)
    rows = initial(spec(), ids)
    assert (rows[7] == initial(spec(), ids[7:8])).all()
    assert np.abs(rows).max() <= 0.5
    assert abs(rows.mean()) < 0.01
    assert rows.std() == pytest.approx(0.5 / np.sqrt(3), rel=0.01)
    assert np.abs(np.corrcoef(rows.T) - np.eye(3)).max() < 0.03
    assert (initial(spec(seed=1), ids[:1]) != rows[0]).all()
    assert initial(spec(dtype="float32"), ids[:1]).dtype == np.float32


def test_shards_have_as_many_ids_each() -> None:
    counts = np.bincount(shard_of(np.arange(30_000), 7), minlength=7)
    assert counts.max() < 1.05 * counts.min()


@given(st.lists(st.integers(0, 5), max_size=30))
def test_gradients_are_summed_by_id(ids: list[int]) -> None:
    values = np.arange(2.0 * len(ids)).reshape(len(ids), 2)
    found, sums = summed(np.array(ids, np.int64), values)
    assert found.tolist() == sorted(set(ids))
    for one, row in zip(found.tolist(), sums, strict=True):
        assert row.tolist() == values[[at for at, i in enumerate(ids) if i == one]].sum(0).tolist()


def trained(table: Table, touched: list[list[int]]) -> np.ndarray:
    drawn = np.random.default_rng(0)
    for step, ids in enumerate(touched):
        table.apply(np.array(ids), drawn.normal(size=(len(ids), 3)), step)
    return table.read(np.arange(5))


TOUCHED = [[0, 3], [3, 1], [0], [4, 0, 3], [1]]


def by_torch(kind: str, **given: float) -> np.ndarray:
    """The same rows, updated by torch: of those that a step does not name nothing changes."""
    drawn = np.random.default_rng(0)
    rows = [torch.tensor(row, requires_grad=True) for row in initial(spec(), np.arange(5))]
    made = {
        "sgd": lambda row: torch.optim.SGD([row], 0.1, **given),
        "adagrad": lambda row: torch.optim.Adagrad([row], 0.1, eps=1e-8),
        "adamw": lambda row: torch.optim.AdamW([row], 0.1, (0.9, 0.999), **given),
    }[kind]
    optimizers = [made(row) for row in rows]
    for ids in TOUCHED:
        for one, gradient in zip(ids, drawn.normal(size=(len(ids), 3)), strict=True):
            rows[one].grad = torch.tensor(gradient)
            optimizers[one].step()
    return torch.stack(rows).detach().numpy()


@pytest.mark.parametrize(("kind", "decay"), [("sgd", 0.0), ("adagrad", 0.0), ("adamw", 0.3)])
def test_updates_are_those_of_torch(kind: str, decay: float) -> None:
    table = Table(spec(optimizer=kind, weight_decay=decay))
    given = {"weight_decay": decay} if decay else {}
    assert trained(table, TOUCHED) == pytest.approx(by_torch(kind, **given), rel=1e-12)


def test_rowwise_adagrad_is_its_formula() -> None:
    table, drawn = Table(spec()), np.random.default_rng(0)
    rows, sums = initial(spec(), np.arange(5)), np.zeros(5)
    for ids in TOUCHED:
        for one, gradient in zip(ids, drawn.normal(size=(len(ids), 3)), strict=True):
            sums[one] += (gradient**2).mean()
            rows[one] -= 0.1 * gradient / (np.sqrt(sums[one]) + 1e-8)
    assert trained(table, TOUCHED) == pytest.approx(rows, rel=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adamw"])
def test_an_update_is_taken_back(kind: str) -> None:
    table = Table(spec(optimizer=kind))
    trained(table, TOUCHED)
    before = {name: value.copy() for name, value in table.arrays().items()}
    ids = np.array([2, 3, 9])
    old = table.read(ids)
    table.apply(ids, np.ones((3, 3)), 9)
    new = table.read(ids)
    assert (new != old).all()
    table.take_back()
    assert (table.read(ids) == old).all()
    for name, value in before.items():
        if name != "used":
            assert (table.arrays()[name][: len(value)] == value).all()
    table.apply(ids, np.ones((3, 3)), 9)
    assert (table.read(ids) == new).all()


def test_an_id_is_admitted_once_enough_steps_have_named_it() -> None:
    table = Table(spec(admit_after=3))
    one = np.array([5])
    for step in range(2):
        table.apply(one, np.ones((1, 3)), step)
        assert table.count == 0
        assert (table.read(one) == initial(table.spec, one)).all()
    again = Table(table.spec)
    again.load(table.arrays())
    for each in (table, again):
        each.apply(one, np.ones((1, 3)), 2)
        assert each.count == 1
        assert (each.read(one) != initial(table.spec, one)).all()


def test_a_step_taken_back_has_named_nobody() -> None:
    table = Table(spec(admit_after=2))
    one = np.array([5])
    table.apply(one, np.ones((1, 3)), 0)
    table.take_back()
    table.apply(one, np.ones((1, 3)), 0)
    assert table.count == 0
    table.apply(one, np.ones((1, 3)), 1)
    assert table.count == 1


def test_who_waits_is_forgotten_too_and_that_cannot_be_taken_back() -> None:
    table = Table(spec(admit_after=3, expire_steps=4))
    one = np.array([5])
    for step in range(3):
        table.apply(one, np.ones((1, 3)), step)
        assert table.expire(step + 1) is False
        table.take_back()
        table.apply(one, np.ones((1, 3)), step)
        if step == 1:
            break
    table.apply(np.array([6]), np.ones((1, 3)), 3)
    assert table.expire(4)
    table.take_back()
    for step in range(4, 6):
        table.apply(one, np.ones((1, 3)), step)
    assert table.count == 0


def test_what_no_step_names_is_forgotten() -> None:
    table = Table(spec(expire_steps=10))
    table.apply(np.array([1, 2]), np.ones((2, 3)), 0)
    table.apply(np.array([2]), np.ones((1, 3)), 8)
    kept = table.read(np.array([2]))
    assert not table.expire(10)
    assert not table.expire(11)  # it looks every other step
    assert table.expire(12)
    assert (table.read(np.array([1])) == initial(table.spec, np.array([1]))).all()
    assert (table.read(np.array([2])) == kept).all()


def test_rows_of_another_table_are_refused() -> None:
    table = Table(spec())
    trained(table, TOUCHED)
    with pytest.raises(InternalError, match="has shape"):
        Table(spec(width=4)).load(table.arrays())
    with pytest.raises(InternalError, match="not"):
        Table(spec(optimizer="sgd")).load(table.arrays())


@pytest.mark.parametrize("codec", [*CODECS])
@pytest.mark.parametrize("size", [0.001, 3.0, 1e6])
def test_codes_decode_as_their_codec_does(codec: str, size: float) -> None:
    torch.manual_seed(0)
    values = size * torch.randn(300 * 7)
    one, to = CODECS[codec], torch.zeros(300 * 7)
    codes = torch.empty(one.bound(len(values)), dtype=torch.uint8)
    one.encode(values, codes)
    one.add(codes, to)
    given = values.numpy() if codec == "none" else codes.numpy()
    found = decoded(codec, given, 300, 7)
    assert np.array_equal(found.reshape(-1), to.numpy())


def test_codes_that_are_too_few_are_refused() -> None:
    with pytest.raises(InternalError, match="9 bytes came"):
        decoded("int8", np.zeros(9, np.uint8), 4, 8)
    with pytest.raises(InternalError, match="values came for 4 rows"):
        decoded("none", np.zeros((3, 8), np.float32), 4, 8)
    with pytest.raises(InternalError, match="no server knows"):
        decoded("zip", np.zeros(9, np.uint8), 4, 8)
