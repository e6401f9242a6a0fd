"""Samples are told apart, of whatever type they are; what is the same has the same digest."""

from __future__ import annotations

import copy
import datetime
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from raycloud.clock import VirtualClock
from raycloud.data.provider import Provided
from raycloud.errors import DataError, TaskError
from raycloud.worker.fingerprint import check_samples, digest_of, fingerprint_of

Pair = namedtuple("Pair", "a b")


@dataclass
class Named:
    text: str
    values: Any


class Graph:
    def __init__(self, edges: Any) -> None:
        self.edges = edges
        self.itself = self


class Slots:
    __slots__ = ("x",)


def image(colour: tuple[int, int, int]) -> Image.Image:
    return Image.new("RGB", (3, 2), colour)


SAMPLES = [
    1,
    1.0,
    True,
    None,
    "a",
    "b",
    b"a",
    [1],
    (1,),
    [],
    Pair(1, 2),
    Pair(2, 1),
    {"x": 1, "y": 2},
    {"x": 2, "y": 1},
    {1, 2},
    {1, 3},
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(2, 3, dtype=torch.float64),
    torch.ones(2, 3),
    torch.zeros(2, 3, dtype=torch.bfloat16),
    torch.tensor(float("nan")),
    torch.zeros(0),
    np.zeros((2, 3)),
    np.float32(0.0),
    np.array(["a", None], dtype=object),
    np.array(["a", "b"], dtype=object),
    Named("a", torch.zeros(2)),
    Named("a", torch.ones(2)),
    Graph(torch.zeros(2, 2)),
    Graph(torch.ones(2, 2)),
    image((0, 0, 0)),
    image((0, 0, 1)),
    pd.DataFrame({"x": [1, 2]}),
    pd.DataFrame({"x": [1, 3]}),
    datetime.date(2024, 1, 1),
    datetime.date(2024, 1, 2),
    Path("a"),
    Slots(),
    torch.zeros(1 << 18),
    torch.cat([torch.zeros((1 << 18) - 1), torch.ones(1)]),
]


def test_what_differs_is_told_apart() -> None:
    digests = [digest_of(sample) for sample in SAMPLES]
    assert len(set(digests)) == len(SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_what_is_the_same_is_the_same(sample: Any) -> None:
    assert digest_of(copy.deepcopy(sample)) == digest_of(sample)


def test_an_order_that_has_no_meaning_has_none() -> None:
    assert digest_of({"x": 1, "y": 2}) == digest_of({"y": 2, "x": 1})
    words = [f"word {n}" for n in range(50)]
    backwards = words[::-1]
    assert digest_of(set(words)) == digest_of(set(backwards))
    assert digest_of(OrderedDict(x=1)) == digest_of({"x": 1})


def test_a_view_is_what_it_shows() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert digest_of(whole.T[1:]) == digest_of(whole.T[1:].clone())
    array = np.arange(12.0).reshape(3, 4)
    assert digest_of(array.T[1:]) == digest_of(array.T[1:].copy())


def test_a_large_sample_is_read_in_part() -> None:
    nested: Any = []
    for _ in range(100):
        nested = [nested] * 100
    assert digest_of(nested)


class Counted:
    """A data set that counts what is read of it, and takes its time."""

    def __init__(self, count: int, clock: VirtualClock, seconds: float = 0.0) -> None:
        self.count, self.read = count, list[int]()
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        self.clock.advance(self.seconds)
        return {"x": torch.full((3,), float(index))}


def seen(train: Any, held_out: Any = None, clock: VirtualClock | None = None) -> dict[str, str]:
    return fingerprint_of(Provided(train=train, held_out=held_out), clock or VirtualClock())


def test_few_samples_are_read() -> None:
    clock = VirtualClock()
    train, held_out = Counted(1_000_000, clock), Counted(3, clock)
    found = seen(train, held_out)
    assert len(train.read) == 10
    assert set(found) >= {"train/524287", "train/999999", "held_out/0", "held_out/2"}


def test_a_slow_data_set_is_read_once_or_twice() -> None:
    clock = VirtualClock()
    train, held_out = Counted(100, clock, 1.0), Counted(100, clock, 0.02)
    found = seen(train, held_out, clock)
    assert (train.read, held_out.read) == ([63], [63, 31])
    assert set(found) == {"train/63", "held_out/63", "held_out/31"}


def test_a_split_that_was_drawn_otherwise() -> None:
    xs = TensorDataset(torch.arange(200.0))
    splits = [
        torch.utils.data.random_split(xs, [150, 50], generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    one, same, other = (seen(train, held_out) for train, held_out in splits)
    assert one == same
    assert all(one[name] != other[name] for name in one)


def test_samples_that_are_others_each_time() -> None:
    class Augmented(Counted):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)["x"] + torch.rand(3)

    with pytest.raises(TaskError, match=r"sample 63 of Task.data's train is another one each") as e:
        seen(Augmented(100, VirtualClock()))
    assert "belongs into Task.batch" in str(e.value.hint)


def test_a_sample_that_cannot_be_read_is_no_difference() -> None:
    class Damaged(Counted):
        def __getitem__(self, index: int) -> Any:
            if index == 63:
                raise OSError("damaged")
            return super().__getitem__(index)

    found = seen(Damaged(100, VirtualClock()))
    assert "train/63" not in found
    assert "train/31" in found


def test_one_that_ends_the_process_is_the_tasks_error() -> None:
    class Ends(Counted):
        def __getitem__(self, index: int) -> Any:
            sys.exit("no such sample")

    with pytest.raises(TaskError, match="SystemExit: no such sample"):
        seen([1.0], Ends(10, VirtualClock()))


@pytest.fixture(name="kept")
def _kept() -> dict[str, str]:
    return seen(Counted(150, VirtualClock()), Counted(20, VirtualClock()))


def test_a_checkpoint_knows_its_samples(kept: dict[str, str]) -> None:
    assert check_samples(kept, kept) == ""
    assert check_samples(kept, None) == ""  # of an older version


def test_data_that_has_grown_is_the_same(kept: dict[str, str]) -> None:
    grown = seen(Counted(190, VirtualClock()), Counted(30, VirtualClock()))
    assert check_samples(grown, kept) == ""
    assert len(grown.keys() & kept.keys()) >= 10


def test_a_sample_that_was_corrected_is_noticed(kept: dict[str, str]) -> None:
    assert check_samples(kept | {"train/63": "other"}, kept) == "train/63"
    assert check_samples({n: "x" if n[0] == "h" else d for n, d in kept.items()}, kept)


def test_other_data_is_refused(kept: dict[str, str]) -> None:
    other = {name: f"{digest}, not" for name, digest in kept.items()}
    with pytest.raises(DataError, match=r"the data has changed: .* \(ids 127, 63") as e:
        check_samples(other, kept)
    assert "start a new run" in str(e.value.hint)


def test_blocks_are_the_same_by_construction() -> None:
    class Blocks(Counted):
        gather = None

    found = seen(Blocks(100, VirtualClock()), Counted(4, VirtualClock()))
    assert {name.partition("/")[0] for name in found} == {"held_out"}
