"""The exchange of gradients: the single process's mean, out of place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.transport import Abandoned
from raycloud.spec.sizes import ring_bytes
from raycloud.sync.buckets import lay_out
from raycloud.sync.gradients import GradientExchange
from raycloud.sync.sparse import sparse_parameters
from raycloud.sync.strategy import AllReduce
from tests.crew import (
    Crew,
    Part,
    Rooms,
    accumulate,
    assert_same,
    gradients,
    parts,
    reference,
    scale,
)
from tests.lockstep import never
from tests.loopback import Loopback

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("counts", [(1,), (3, 2), (1, 4, 2)], ids=str)
def test_every_member_ends_with_the_weighted_mean(
    dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    crew = Crew(len(counts), dtype=dtype)
    dealt = [parts(count, seed=seed, dtype=dtype) for seed, count in enumerate(counts)]
    crew.compute(dealt)
    crew.collect()
    for model in crew.models:
        assert_same(model, reference(dealt, dtype), TOLERANCE[dtype])
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_own_gradients_are_never_written_to() -> None:
    crew, alone = Crew(2), Rooms()
    dealt = [parts(2), parts(1, seed=1)]
    for part in dealt[0]:
        (alone.loss(part) * part.weight).backward()
    crew.compute(dealt)
    own = [p.grad for p in crew.models[0].parameters()]
    crew.collect()
    assert all(
        a is not None and p.grad is not a
        for a, p in zip(own, crew.models[0].parameters(), strict=True)
    )
    crew.exchanges[0].clip(1.0, 0.001)
    for gradient, mine in zip(gradients(alone).values(), own, strict=True):
        assert gradient is not None
        assert mine is not None
        assert torch.equal(gradient, mine)
    crew.exchanges[0].clear()
    assert not any(gradients(crew.models[0]).values())


def test_a_broken_step_can_be_exchanged_again_elsewhere() -> None:
    crew, undisturbed, dealt = Crew(2), Crew(2), [parts(2), parts(1, seed=1)]
    crew.compute(dealt, ranks=[0])
    crew.hub.cut("the other one is gone")
    with pytest.raises(TransportError, match="gone"):
        crew.exchanges[0].collect(never)
    crew.compute(dealt, ranks=[1])
    with pytest.raises(TransportError, match="gone"):
        crew.exchanges[1].collect(never)
    crew.connect(Loopback(2))
    again(crew.exchanges, dealt)
    undisturbed.compute(dealt)
    assert crew.collect() == undisturbed.collect()
    assert_same(crew.models[0], reference(dealt))


def again(exchanges: list[GradientExchange], dealt: list[list[Part]]) -> None:
    """Send gradients that were computed before."""
    for exchange in exchanges:
        exchange.begin(scale(dealt))
        exchange.send()


def test_a_parameter_that_nobody_used_is_skipped_by_the_optimizer() -> None:
    crew, alone = Crew(2), Rooms()
    models = [alone, *crew.models]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for model in models
    ]
    for step in range(4):
        dealt = [parts(2, seed=2 * step), parts(1, seed=2 * step + 1)]
        if step in {0, 2}:  # layer 1 is not used: neither momentum nor weight decay moves it
            dealt = [[Part(weight=p.weight, x=p.x, through=(0, 2)) for p in mine] for mine in dealt]
        crew.compute(dealt)
        crew.collect()
        accumulate(alone, dealt)
        before = alone.layers[1].weight.clone()
        for model in crew.models:
            assert_same(model, alone)
            assert (model.layers[1].weight.grad is None) == (step in {0, 2})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for exchange in crew.exchanges:
            exchange.clear()
        assert torch.equal(before, alone.layers[1].weight) == (step in {0, 2})
    for model in crew.models:
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_parameter_used_by_one_member_only() -> None:
    crew = Crew(3)
    x = parts(1)[0].x
    dealt = [
        [Part(weight=1.0, x=x, through=(0,))],
        [Part(weight=2.0, x=x, through=(0, 1)), Part(weight=1.0, x=x, through=(0,))],
        [Part(weight=3.0, x=-x, through=(0,))],
    ]
    crew.compute(dealt)
    crew.collect()
    for model in crew.models:
        assert_same(model, reference(dealt))
        assert model.layers[2].weight.grad is None


def test_a_gradient_of_zero_is_not_none() -> None:
    crew = Crew(2)
    nothing = Part(weight=1.0, x=torch.zeros(3, 4, dtype=torch.float64), through=(0,))
    dealt = [[nothing], [Part(weight=1.0, x=parts(1)[0].x, through=(1,))]]
    crew.compute(dealt)
    crew.collect()
    weight = crew.models[1].layers[0].weight
    assert weight.grad is not None
    assert not weight.grad.any()


def test_members_without_micro_batches() -> None:
    crew = Crew(3)
    dealt = [[], parts(2), []]
    crew.compute(dealt)
    crew.collect()
    for model in crew.models:
        assert_same(model, reference(dealt))


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e6])
def test_norm_and_clipping_are_those_of_torch(limit: float) -> None:
    crew, dealt = Crew(2), [parts(2), parts(3, seed=1)]
    alone = reference(dealt)
    crew.compute(dealt)
    found = crew.collect()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
    for model, exchange, exchanged in zip(crew.models, crew.exchanges, found, strict=True):
        assert exchanged.norm == pytest.approx(float(norm), rel=1e-12)
        exchange.clip(exchanged.norm, limit)
        assert_same(model, alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_member_without_a_finite_gradient_is_seen_by_all(value: float) -> None:
    crew = Crew(2)
    crew.compute([[Part(weight=1.0, x=torch.full((3, 4), value).double())], parts(1)])
    assert not any(exchanged.norm < float("inf") for exchanged in crew.collect())


def test_after_a_broken_exchange_the_step_is_exchanged_by_others_with_fresh_buffers() -> None:
    crew, dealt = Crew(3), [parts(2), parts(1, seed=1), parts(3, seed=2)]
    crew.compute(dealt, ranks=(0, 2))  # member 1 dies before it has sent anything
    own = gradients(crew.models[0])
    with pytest.raises(Abandoned):
        crew.exchanges[0].collect(lambda: True)
    crew.hub.cut("member 1 is gone")
    for rank in (0, 2):
        with pytest.raises(TransportError, match="member 1 is gone"):
            crew.exchanges[rank].collect(never)
    for name, gradient in gradients(crew.models[0]).items():
        assert gradient is not None
        assert torch.equal(gradient, own[name])  # type: ignore[arg-type]
    old = [bucket.flat for bucket in crew.exchanges[0].buckets]

    hub = Loopback(2)
    for rank, transport in zip((0, 2), hub.members, strict=True):
        crew.exchanges[rank].connect(transport)
    for buffer in old:  # what the broken exchange may still do
        buffer.fill_(float("nan"))
    left = [dealt[0], dealt[2]]
    again([crew.exchanges[0], crew.exchanges[2]], left)
    for rank in (0, 2):
        crew.exchanges[rank].collect(never)
        assert_same(crew.models[rank], reference(left))
    for buffer in old:
        buffer.fill_(float("nan"))
    assert_same(crew.models[0], reference(left))


def test_connecting_again_after_whole_steps_keeps_the_buffers() -> None:
    crew, dealt = Crew(2), [parts(1), parts(1, seed=1)]
    crew.compute(dealt)
    crew.collect()
    before = [bucket.flat.data_ptr() for bucket in crew.exchanges[0].buckets]
    crew.connect(Loopback(2))
    assert [bucket.flat.data_ptr() for bucket in crew.exchanges[0].buckets] == before


def test_send_without_begin_is_our_own_fault() -> None:
    exchange = GradientExchange(
        list(Rooms().named_parameters()), bucket_bytes=16, strategy=AllReduce()
    )
    with pytest.raises(InternalError, match="begin"):
        exchange.send()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whether_all_hold_the_next_change_is_known_with_the_gradients(dtype: torch.dtype) -> None:
    crew, dealt = Crew(3, dtype=dtype), [parts(1, dtype=dtype), [], parts(1, seed=1, dtype=dtype)]
    for holders in ((), (0, 2), (0, 1), (0, 1, 2), (1,)):
        crew.compute(dealt, at_hand=lambda rank, holders=holders: rank in holders)
        assert [sent.agreed for sent in crew.collect()] == [len(holders) == 3] * 3
        for exchange in crew.exchanges:
            exchange.clear()


def test_who_computes_alone_agrees_with_itself() -> None:
    crew = Crew(1)
    crew.compute([parts(1)], at_hand=lambda _: True)
    assert crew.collect()[0].agreed


def test_bytes() -> None:
    crew, dealt = Crew(2), [parts(1), parts(1, seed=1)]
    crew.compute(dealt)
    numbers = sum(p.numel() for p in crew.models[0].parameters())
    assert crew.exchanges[0].gradient_bytes == numbers * 8
    (sent, _) = crew.collect()
    flags = (4 + 6) * 4  # four, and one a parameter
    assert sent.bytes_sent == ring_bytes(numbers * 8, 2) + ring_bytes(flags, 2)


def test_where_one_has_not_sent_its_part_nobody_goes_on_with_the_sum() -> None:
    """Its last backward has failed halfway: it computes again, and all exchange once more."""
    crew, dealt = Crew(2), [parts(2), parts(1, seed=1)]
    crew.compute(dealt, ranks=[0])
    own, second = gradients(crew.models[0]), crew.exchanges[1]
    second.begin(scale(dealt))
    crew.models[1].layers[2](dealt[1][0].x).sum().backward()
    second.restart()
    assert not any(gradients(crew.models[1]).values())
    for part in dealt[1]:  # it is armed, but these are not sent as they come
        (crew.models[1].loss(part) * part.weight).backward()
    second.send()
    assert [sent.astray for sent in crew.collect()] == [True, True]
    for mine, now in zip(own.values(), gradients(crew.models[0]).values(), strict=True):
        assert mine is not None
        assert now is not None
        assert torch.equal(mine, now)
    again(crew.exchanges, dealt)
    assert [sent.astray for sent in crew.collect()] == [False, False]
    for model in crew.models:
        assert_same(model, reference(dealt))


def test_what_is_copied_goes_where_there_is_room_and_can_be_shown_again() -> None:
    crew, dealt = Crew(2), [parts(2), parts(1, seed=1)]
    crew.compute(dealt)
    crew.collect()
    exchange, room = crew.exchanges[0], crew.exchanges[0].room()
    copies = exchange.sums(room)
    assert all(mine is theirs for mine, theirs in zip(copies, room, strict=True))
    exchange.clear()
    for bucket in exchange.buckets:
        bucket.flat.zero_()
    exchange.install_gradients(copies)
    assert_same(crew.models[0], reference(dealt))


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
shapes = st.lists(st.integers(0, 5), max_size=3)
described = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def parameters(kinds: list[tuple[list[int], torch.dtype]]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for i, (shape, dtype) in enumerate(kinds)
    ]


@given(described, st.integers(1, 200))
def test_every_parameter_once_in_reverse_order_and_no_mixed_types(
    kinds: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    made = parameters(kinds)
    buckets = lay_out(made, bucket_bytes)
    assert [n for b in buckets for n in b.names] == [n for n, _ in reversed(made)]
    for bucket in buckets:
        assert {p.dtype for p in bucket.parameters} == {bucket.flat.dtype}
        assert [slot.shape for slot in bucket.slots] == [p.shape for p in bucket.parameters]
        assert bucket.flat.numel() == sum(p.numel() for p in bucket.parameters)
    again = lay_out(parameters(kinds), bucket_bytes)
    assert [b.names for b in again] == [b.names for b in buckets]
    assert [b.payload_bytes for b in again] == [b.payload_bytes for b in buckets]


@given(described, st.integers(1, 200))
def test_slots_cover_the_values_without_overlap(
    kinds: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    for bucket in lay_out(parameters(kinds), bucket_bytes):
        for i, slot in enumerate(bucket.slots):
            slot.fill_(i + 1)
        expected = [i + 1 for i, p in enumerate(bucket.parameters) for _ in range(p.numel())]
        assert bucket.flat.tolist() == expected
        before = bucket.flat
        bucket.renew()
        bucket.slots[0].fill_(7)
        assert before.data_ptr() != bucket.flat.data_ptr() or not before.numel()
        assert (
            bucket.flat[: bucket.parameters[0].numel()].tolist()
            == bucket.slots[0].flatten().tolist()
        )
        assert before[: len(expected)].tolist() == expected


def test_the_bucket_that_fills_first_is_small() -> None:
    made = parameters([([10], torch.float32)] * 20)  # 40 bytes each
    buckets = lay_out(made, 400)
    assert [len(b.names) for b in buckets] == [3, 10, 7]


def test_a_large_parameter_has_a_bucket_to_itself_or_closes_one() -> None:
    made = parameters([([4], torch.float32), ([1000], torch.float32), ([4], torch.float32)])
    assert [b.names for b in lay_out(made, 64)] == [("p2",), ("p1",), ("p0",)]
    assert [b.names for b in lay_out(made, 128)] == [("p2", "p1"), ("p0",)]


def test_another_type_starts_another_bucket() -> None:
    made = parameters(
        [([2], torch.float32), ([2], torch.bfloat16), ([2], torch.bfloat16), ([2], torch.float32)]
    )
    assert [b.names for b in lay_out(made, 10_000)] == [("p3",), ("p2", "p1"), ("p0",)]


class Recomputed(nn.Module):
    """One layer used twice, the second time under activation checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.layer, self.layer(x), use_reentrant=self.reentrant)
        return again.sum()


def exchange(model: nn.Module) -> GradientExchange:
    """Its gradients, ready for the step's last backward pass."""
    made = GradientExchange(list(model.named_parameters()), bucket_bytes=64, strategy=AllReduce())
    made.begin(1.0)
    return made


def test_a_gradient_that_comes_twice_in_one_backward_is_refused() -> None:
    model = Recomputed(reentrant=True)
    exchange(model)
    with pytest.raises(TaskError, match=r"'layer\.\w+' was computed twice") as refused:
        model(torch.ones(2, 3)).backward()
    assert "use_reentrant=False" in refused.value.hint


def test_activation_checkpointing_that_is_not_reentrant() -> None:
    model, alone = Recomputed(reentrant=False), Recomputed(reentrant=False)
    alone.load_state_dict(model.state_dict())
    gradients = exchange(model)
    x = torch.ones(2, 3)
    model(x).backward()
    alone(x).backward()
    gradients.send()
    gradients.collect(never)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


class Words(nn.Module):
    """Rows by id, of which each part touches some; and a layer."""

    def __init__(self, *, sparse: bool, alone: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.rows = nn.Embedding(9, 3, sparse=sparse, dtype=torch.float64)
        self.layer = None if alone else nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def loss(self, ids: list[int]) -> Tensor:
        found: Tensor = self.rows(torch.tensor(ids))
        return (found if self.layer is None else self.layer(found)).square().sum()


def mean_of(model: Words, every: list[list[list[int]]], limit: float | None = None) -> None:
    """Give a single process's model, whose gradients are dense, those of all parts."""
    count = sum(map(len, every))
    for one in every:
        for ids in one:
            (model.loss(ids) / count).backward()
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


@pytest.mark.parametrize("alone", [False, True], ids=["beside a layer", "alone"])
@pytest.mark.parametrize(
    "every",
    [[[[1, 2], [2, 5]], [[5, 8], [1]]], [[[3]], [[7, 7, 0]]], [[[4, 1]], []], [[[1], [2], [1]]]],
    ids=["rows of both", "rows apart", "one has none", "one member"],
)
def test_sparse_gradients_are_those_of_one_process(
    every: list[list[list[int]]], *, alone: bool
) -> None:
    models = [Words(sparse=True, alone=alone) for _ in every]
    hub, count = Loopback(len(every)), sum(map(len, every))
    exchanges = []
    for model, transport in zip(models, hub.members, strict=True):
        known = list(model.named_parameters())
        sparse = sparse_parameters(model)
        one = GradientExchange(known, bucket_bytes=64, strategy=AllReduce(), sparse=sparse)
        one.connect(transport)
        exchanges.append(one)
    for model, one, mine in zip(models, exchanges, every, strict=True):
        for ids in mine[:-1]:
            model.loss(ids).backward()
        one.begin(1.0 / count)
        for ids in mine[-1:]:
            model.loss(ids).backward()
        one.send()
    own = [model.rows.weight.grad for model in models]
    with ThreadPoolExecutor(len(every)) as threads:
        found = list(threads.map(lambda one: one.collect(never), exchanges))
    expected, clipped = Words(sparse=False, alone=alone), Words(sparse=False, alone=alone)
    mean_of(expected, every)
    mean_of(clipped, every, limit=0.5)
    wanted = [p.grad for p in expected.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(wanted))
    touched = {k for mine in every for ids in mine for k in ids}
    for model, one, exchanged, before in zip(models, exchanges, found, own, strict=True):
        grad = model.rows.weight.grad
        assert grad is not None
        assert grad is not before, "a member's own gradients stay as they are"
        assert grad.is_sparse
        assert {*grad.coalesce().indices()[0].tolist()} == touched
        assert exchanged.norm == pytest.approx(norm)
        for _, p in model.named_parameters():
            assert p.grad is not None
            p.grad = p.grad.to_dense() if p is not model.rows.weight else p.grad
        for other, limit in ((expected, 1e9), (clipped, 0.5)):
            one.clip(exchanged.norm, limit)
            theirs = other.rows.weight.grad
            assert theirs is not None
            torch.testing.assert_close(grad.to_dense(), theirs, rtol=1e-5, atol=1e-9)
    assert len({exchanged.bytes_sent for exchanged in found}) == 1


def test_a_parameter_with_a_dense_gradient_beside_its_sparse_one_is_refused() -> None:
    model = Words(sparse=True, alone=True)
    one = GradientExchange(
        list(model.named_parameters()),
        bucket_bytes=64,
        strategy=AllReduce(),
        sparse=sparse_parameters(model),
    )
    one.begin(1.0)
    (model.loss([1]) + model.rows.weight.sum()).backward()
    with pytest.raises(TaskError, match=r"'rows\.weight' is dense") as refused:
        one.send()
    assert "sparse=False" in refused.value.hint


def test_a_broken_exchange_leaves_sparse_gradients_alone() -> None:
    model, hub = Words(sparse=True), Loopback(2)
    one = GradientExchange(
        list(model.named_parameters()),
        bucket_bytes=64,
        strategy=AllReduce(),
        sparse=sparse_parameters(model),
    )
    one.connect(hub.members[0])
    one.begin(0.5)
    model.loss([1, 2]).backward()
    one.send()
    before = model.rows.weight.grad
    hub.cut("the other one is gone")
    with pytest.raises(TransportError, match="gone"):
        one.collect(never)
    assert before is not None
    assert model.rows.weight.grad is before
    assert before.coalesce().indices().tolist() == [[1, 2]]


@pytest.mark.parametrize("earlier", [False, True], ids=["last pass", "an earlier pass only"])
def test_a_sparse_gradient_of_another_kind_is_refused_with_its_name(earlier: bool) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True), "head": nn.Linear(3, 1)})
    loss = model["head"](model["words"](torch.tensor([1, 2]))).sum()
    if earlier:
        loss.backward()
    gradients = exchange(model)
    if earlier:
        loss = model["head"](torch.ones(1, 3)).sum()

    def finish() -> None:
        loss.backward()
        gradients.send()

    with pytest.raises(TaskError, match=r"'words\.weight' is sparse") as refused:
        finish()
    assert "sparse=False" in refused.value.hint
