"""The first promise over blocks: the same ids and the same result for any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.order import MicroBatch
from raycloud.step.collate import StepWork
from tests.blocks import BlockTask, asked, provided, write_points
from tests.lockstep import Fleet, difference

ROWS, STEPS = 212, 30  # a step takes 16: two epochs and a bit, and each has a short last step
SHARES = [(8,), (4, 4), (5, 2, 1), (2, 2, 2, 1, 1)]

Sequence = list[tuple[MicroBatch, tuple[int, ...]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of points."""
    folder = tmp_path_factory.mktemp("points")
    write_points(folder / "a.parquet", 0, 130)
    write_points(folder / "b.parquet", 130, ROWS - 130)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Watched(Fleet):
    """Remembers which samples each micro-batch held."""

    def compute(self, number: int) -> list[StepWork]:
        works = super().compute(number)
        taken = [
            (one.micro_batches[0], tuple(one.batch[2].tolist()))
            for work in works
            for one in work.passes
        ]
        self.taken: Sequence = [*getattr(self, "taken", []), *sorted(taken, key=_place)]
        return works


def _place(taken: tuple[MicroBatch, tuple[int, ...]]) -> int:
    return taken[0].start


def fleet(files: Path, cache: Path, shares: tuple[int, ...]) -> Watched:
    job, task = asked(files), BlockTask(norm=True)
    samples, order = provided(job, task, cache)
    return Watched(job, task, shares, samples=samples, order=order)


@pytest.fixture(scope="module")
def alone(files: Path, cache: Path) -> Watched:
    """The single worker that all others must equal."""
    made = fleet(files, cache, (8,))
    for step in range(STEPS):
        made.step(step)
    return made


def test_an_epoch_has_every_row_once_in_the_order_of_the_job(alone: Watched) -> None:
    taken = [i for m, ids in alone.taken if m.epoch == 0 for i in ids]
    assert sorted(taken) == list(range(ROWS))
    assert taken == alone.order.ids(0, 0, ROWS).tolist()
    second = [i for m, ids in alone.taken if m.epoch == 1 for i in ids]
    assert sorted(second) == list(range(ROWS))
    assert second != taken


@pytest.mark.parametrize("shares", SHARES[1:], ids=str)
def test_any_number_of_workers_takes_and_computes_the_same(
    shares: tuple[int, ...], alone: Watched, files: Path, cache: Path
) -> None:
    made = fleet(files, cache, shares)
    for step in range(STEPS):
        made.step(step)
    assert made.taken == alone.taken
    for replica in made.replicas:
        assert difference(replica.model, alone.replicas[0].model) <= 1e-9


def test_new_shares_on_the_way_change_nothing(alone: Watched, files: Path, cache: Path) -> None:
    made = fleet(files, cache, (3, 3, 2))
    for step in range(STEPS):
        if step == 9:
            made.shares = (0, 1, 7)
        if step == 20:
            made.shares = (4, 4, 0)
        made.step(step)
    assert made.taken == alone.taken
    assert difference(made.replicas[1].model, alone.replicas[0].model) <= 1e-9


@pytest.mark.parametrize("resized", [1, 5], ids="{} workers".format)
def test_other_workers_go_on_in_the_middle_of_an_epoch(
    resized: int, alone: Watched, files: Path, cache: Path
) -> None:
    first = fleet(files, cache, (4, 4))
    for step in range(17):
        first.step(step)
    shares = (8,) if resized == 1 else (2, 2, 2, 1, 1)
    later = fleet(files, cache, shares)
    state = first.replicas[1].state
    for replica in later.replicas:
        tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
        replica.state.load(tensors, state.values())
    later.position = first.position
    for step in range(17, STEPS):
        later.step(step)
    assert first.taken + later.taken == alone.taken
    assert difference(later.replicas[-1].model, alone.replicas[0].model) <= 1e-9
