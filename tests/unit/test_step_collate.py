"""Passes: what they hold depends on the place in the sequence, never on who collates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycloud.clock import VirtualClock
from raycloud.errors import DataError, TaskError
from raycloud.order import MicroBatch, Order, Position, Steps
from raycloud.rows import Rows
from raycloud.step import collate as collating
from raycloud.step.collate import Collate, Making, Pass
from tests.lockstep import NetTask

SAMPLES = 40
ORDER = Order(samples=SAMPLES, seed=5)
EVERY = Steps(samples=SAMPLES, global_batch=16, micro_batch=4).span(0, Position()).micro_batches


class Numbers(NetTask):
    """Samples are their own ids; `noise` is drawn to augment them."""

    def __init__(self, *, draws: int = 0, form: str = "tensor") -> None:
        super().__init__()
        self.draws, self.form = draws, form

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        values = torch.tensor(samples, dtype=torch.float64)
        if self.draws and rng is not None:
            kinds = (rng.random, lambda n: rng.integers(0, 9, n), rng.standard_normal)
            values = values + torch.from_numpy(np.asarray(kinds[self.draws - 1](len(samples))))
        return {"tensor": values, "total": values.sum(), "dict": {"x": values}}[self.form]

    def weight(self, batch: Any, samples: int) -> float:
        return 0.5 * samples


class Asked:
    """Samples that are asked for many at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, ids: list[int]) -> list[int]:
        self.asked.append(ids)
        return ids


def collate(task: NetTask | None = None, *, order: Order = ORDER) -> Collate:
    return Collate(task or Numbers(), range(SAMPLES), order, pinned=False)


@pytest.mark.parametrize(
    ("fuse", "sizes"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (3, [3, 1]), (4, [4]), (9, [4])]
)
def test_micro_batches_are_grouped_in_order(fuse: int, sizes: list[int]) -> None:
    passes = collate().passes(EVERY, fuse)
    assert [len(one.micro_batches) for one in passes] == sizes
    assert tuple(m for one in passes for m in one.micro_batches) == EVERY
    assert [one.samples for one in passes] == [4 * size for size in sizes]
    assert [one.weight for one in passes] == [2.0 * size for size in sizes]
    ids = [int(value) for one in passes for value in one.batch]
    assert ids == ORDER.ids(0, 0, 16).tolist()


@pytest.mark.parametrize(
    ("apart", "sizes"), [(0, [3, 1]), (1, [3, 1]), (2, [2, 2]), (3, [1, 3]), (9, [3, 1])]
)
def test_the_last_share_no_pass_with_others(apart: int, sizes: list[int]) -> None:
    making = Making(apart=apart)
    passes = Collate(Numbers(), range(SAMPLES), ORDER, pinned=False, making=making).passes(EVERY, 3)
    assert [len(one.micro_batches) for one in passes] == sizes
    assert tuple(m for one in passes for m in one.micro_batches) == EVERY


def test_no_micro_batches_make_no_passes() -> None:
    assert collate().passes([], 4) == ()


def test_many_samples_are_asked_for_at_once() -> None:
    samples = Asked()
    Collate(Numbers(), samples, ORDER, pinned=False).passes(EVERY, 2)
    assert samples.asked == [ORDER.ids(0, 0, 8).tolist(), ORDER.ids(0, 8, 16).tolist()]
    assert all(type(i) is int for ids in samples.asked for i in ids)


def same(one: Pass, other: Pass) -> bool:
    assert (one.micro_batches, one.weight, one.seed) == (
        other.micro_batches,
        other.weight,
        other.seed,
    )
    return bool(torch.equal(one.batch, other.batch))


@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_a_pass_is_the_same_whoever_makes_it(draws: int) -> None:
    task = Numbers(draws=draws)
    whole = collate(task).passes(EVERY, 1)
    other = collate(task)  # another member, that begins elsewhere
    assert all(same(other.one(EVERY[k]), whole[k]) for k in (2, 0, 3, 1))
    assert len({one.seed for one in whole}) == 4


def test_randomness_depends_on_seed_epoch_and_place() -> None:
    task = Numbers(draws=1)
    first = collate(task).one(EVERY[0])
    moved = MicroBatch(index=0, epoch=0, start=4, stop=8)
    later = MicroBatch(index=0, epoch=1, start=0, stop=4)
    renumbered = MicroBatch(index=3, epoch=0, start=0, stop=4)
    noises = [
        (one.batch % 1).tolist()
        for one in (
            first,
            collate(task).one(moved),
            collate(task).one(later),
            collate(task, order=Order(samples=SAMPLES, seed=6)).one(EVERY[0]),
        )
    ]
    assert len(set(map(tuple, noises))) == 4
    assert torch.equal(collate(task).one(renumbered).batch, first.batch)
    assert collate(task).one(renumbered).seed == first.seed


@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_augmented_batches_fuse_into_what_each_micro_batch_is_alone(draws: int, form: str) -> None:
    def values(one: Pass) -> Tensor:
        batch: Tensor = one.batch["x"] if form == "dict" else one.batch
        return batch

    made = collate(Numbers(draws=draws, form=form))
    made.joins = True
    (fused,) = made.passes(EVERY, 4)
    singles = made.passes(EVERY, 1)
    assert torch.equal(values(fused), torch.cat([values(one) for one in singles]))
    assert fused.weight == sum(one.weight for one in singles)
    assert fused.seed == singles[0].seed


def test_augmented_batches_that_cannot_be_joined_stay_apart() -> None:
    made = collate(Numbers(draws=1, form="total"))
    made.joins = True
    passes = made.passes(EVERY, 4)
    assert [len(one.micro_batches) for one in passes] == [1, 1, 1, 1]
    assert all(same(one, made.one(m)) for one, m in zip(passes, EVERY, strict=True))


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf"), -float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    class Weighs(Numbers):
        def weight(self, batch: Any, samples: int) -> float:
            return weight

    with pytest.raises(TaskError, match=r"Task\.weight returned") as refused:
        collate(Weighs()).one(EVERY[0])
    assert "not negative" in refused.value.hint


def test_a_weight_of_zero_is_one() -> None:
    class Weighs(Numbers):
        def weight(self, batch: Any, samples: int) -> float:
            return 0

    assert collate(Weighs()).one(EVERY[0]).weight == 0.0


def test_what_the_task_raises_is_the_tasks_fault_and_says_where() -> None:
    class Raises(Numbers):
        def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
            raise KeyError("label")

    with pytest.raises(TaskError, match=r"KeyError: 'label' \(epoch 0, samples \[4, 12\)"):
        collate(Raises()).passes(EVERY[1:3], 2)

    class Weighs(Numbers):
        def weight(self, batch: Any, samples: int) -> float:
            raise KeyError("tokens")

    with pytest.raises(TaskError, match=r"Task\.weight raised KeyError: 'tokens'"):
        collate(Weighs()).one(EVERY[0])


def test_an_error_that_says_whose_fault_it_is_passes_through() -> None:
    class Raises(Numbers):
        def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
            raise DataError("a picture is torn")

    with pytest.raises(DataError, match="torn"):
        collate(Raises()).one(EVERY[0])


class Blocks:
    """Samples that are gathered as rows."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.asked: list[list[int]] = []
        self.wanted: list[list[int]] = []
        self.gathering: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def gather(self, ids: np.ndarray[Any, Any]) -> Rows:
        self.asked.append(ids.tolist())
        self.gathering()
        return Rows({"id": ids})

    def prefetch(self, ids: np.ndarray[Any, Any]) -> None:
        self.wanted.append(ids.tolist())


class RowNumbers(Numbers):
    """The same of rows; `spoils` them on the way."""

    def __init__(self, *, draws: int = 0, spoils: bool = False) -> None:
        super().__init__(draws=draws)
        self.spoils = spoils
        self.batches = 0

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        assert isinstance(samples, Rows)
        self.batches += 1
        made = super().batch(samples["id"], rng)  # type: ignore[arg-type]
        if self.spoils:
            samples["id"][:] = -1
        return made


@pytest.mark.parametrize("fuse", [1, 3, 4])
def test_rows_are_gathered_once_a_step(fuse: int) -> None:
    samples, clock = Blocks(), VirtualClock()
    samples.gathering = lambda: clock.advance(1.0)
    made = Collate(RowNumbers(), samples, ORDER, pinned=False, clock=clock).passes(EVERY, fuse)
    assert samples.asked == [ORDER.ids(0, 0, 16).tolist()]
    assert [i for one in made for i in one.batch.tolist()] == samples.asked[0]
    assert [one.read_s for one in made] == [one.samples / 16 for one in made]


@pytest.mark.parametrize("spoils", [False, True])
def test_augmented_rows_are_those_of_each_micro_batch(spoils: bool) -> None:
    samples, task = Blocks(), RowNumbers(draws=3, spoils=spoils)
    made = Collate(task, samples, ORDER, pinned=False)
    made.joins = True
    first, second = made.passes(EVERY, 4)[0], made.passes(EVERY, 4)[0]
    assert (len(samples.asked), task.batches) == (3, 1 + 4 + 4)  # once it drew, no more is tried
    apart = torch.cat([one.batch for one in collate(Numbers(draws=3)).passes(EVERY, 1)])
    assert torch.equal(first.batch, apart)
    assert torch.equal(second.batch, apart)


def test_hints_are_of_the_same_part_of_a_later_step() -> None:
    """An epoch of 40 has two whole steps of 16; its last one, of 8, has other parts."""
    samples = Blocks()
    made = Collate(RowNumbers(), samples, ORDER, pinned=False)
    made.want([EVERY[0], EVERY[1], EVERY[3]], 1, 16)
    assert samples.wanted == [ORDER.ids(0, 16, 24).tolist(), ORDER.ids(0, 28, 32).tolist()]
    samples.wanted.clear()
    made.want(EVERY[1:3], 3, 16)
    assert samples.wanted == [ORDER.ids(1, 20, 28).tolist()]
    samples.wanted.clear()
    made.want(EVERY[:1], 4, 2 * SAMPLES)  # an epoch that has no whole step
    assert samples.wanted == [ORDER.ids(8, 0, 4).tolist()]
    collate().want(EVERY, 1, 16)  # without effect


def test_grown_samples_are_read_from_their_epoch_on() -> None:
    before, after = Blocks(), Blocks(SAMPLES + 8)
    made = Collate(RowNumbers(), before, ORDER, pinned=False)
    made.extend(after, 2, None)
    assert made.order.samples_in(1) == SAMPLES
    old = made.one(MicroBatch(index=0, epoch=1, start=36, stop=40))
    assert old.batch.tolist() == ORDER.ids(1, 36, 40).tolist()
    grown = Order(samples=SAMPLES + 8, seed=5)
    new = made.one(MicroBatch(index=0, epoch=2, start=40, stop=48))
    assert new.batch.tolist() == grown.ids(2, 40, 48).tolist()
    assert (before.asked, len(after.asked)) == ([], 2)
    with pytest.raises(IndexError):
        made.one(MicroBatch(index=0, epoch=1, start=40, stop=48))


def test_the_generator_is_a_fresh_one_whatever_was_drawn_before() -> None:
    collate = Collate(Numbers(), range(SAMPLES), ORDER, pinned=False)  # type: ignore[arg-type]
    for key in (0, 5, 2**63 - 1, 5):
        rng = collate._generator(key)
        fresh = np.random.Generator(np.random.Philox(key=key))
        assert rng.random(7).tolist() == fresh.random(7).tolist()
        assert rng.integers(0, 9, 3, dtype=np.uint32).tolist() == (
            fresh.integers(0, 9, 3, dtype=np.uint32).tolist()  # half a number is left over
        )
        assert rng.standard_normal() == fresh.standard_normal()


@pytest.mark.parametrize("joins", [False, True])
def test_what_draws_is_joined_only_where_that_was_seen_to_change_nothing(joins: bool) -> None:
    drawing = collate(Numbers(draws=1))
    drawing.joins = joins
    sizes = [len(one.micro_batches) for one in drawing.passes(EVERY, 4)]
    assert sizes == ([4] if joins else [1, 1, 1, 1])


class Shaken:
    """Samples whose reading fails as often as it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if index == 3 and self.errors:
            raise self.errors.pop(0)
        return index


class ShakenTogether(Shaken):
    """The same, asked for many at once."""

    def __getitems__(self, ids: list[int]) -> list[int]:
        return [self[index] for index in ids]


LOST = ConnectionResetError(104, "Connection reset by peer")


@pytest.mark.parametrize("kind", [Shaken, ShakenTogether])
@pytest.mark.parametrize("errors", [(LOST,), (TimeoutError("too slow"), LOST)], ids=len)
def test_a_lost_connection_is_waited_for(
    kind: type[Shaken], errors: tuple[Exception, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(collating, "wait", paused.append)
    samples = kind(*errors)
    made = Collate(Numbers(), samples, Order(samples=SAMPLES, seed=5), pinned=False)
    whole = Steps(samples=SAMPLES, global_batch=SAMPLES, micro_batch=4).span(0, Position())
    passes = made.passes(whole.micro_batches, 4)
    assert sorted(int(value) for one in passes for value in one.batch) == list(range(SAMPLES))
    assert paused == [0.5, 2.0][: len(errors)]


@pytest.mark.parametrize(
    ("errors", "pauses", "said"),
    [([LOST] * 3, 2, "ConnectionResetError"), ([KeyError("label")], 0, "KeyError")],
)
def test_what_does_not_pass_is_an_error(
    errors: list[Exception], pauses: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(collating, "wait", paused.append)
    samples = Shaken(*errors)
    made = Collate(Numbers(), samples, Order(samples=SAMPLES, seed=5), pinned=False)
    whole = Steps(samples=SAMPLES, global_batch=SAMPLES, micro_batch=4).span(0, Position())
    with pytest.raises(TaskError, match=f"reading the samples raised {said}"):
        made.passes(whole.micro_batches, 4)
    assert len(paused) == pauses
    assert samples.errors == []
