"""Batches arrive as they were, of any form that a task gives, and nothing is unpickled."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from raycloud.errors import TransportError
from raycloud.net.batches import UnpackableError, packed, unpacked


class Pair(NamedTuple):
    """Two things."""

    left: Any
    right: Any


class NotAPair(NamedTuple):
    """Nobody sends it."""

    left: Any


def sent(batch: Any) -> Any:
    arrays: list[Any] = []
    told = json.loads(json.dumps(packed(batch, arrays)))
    return unpacked(told, [array.copy() for array in arrays])


def test_a_batch_arrives_as_it_was() -> None:
    batch = {
        "pair": Pair(torch.arange(6.0).reshape(2, 3).T, [torch.tensor(3)]),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4, dtype=torch.int32),
        "array": np.arange(4, dtype=np.int16).reshape(2, 2),
        "plain": (1, 0.1, "x", None, True),
    }
    found = sent(batch)
    assert list(found) == list(batch)
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].left, batch["pair"].left)  # type: ignore[attr-defined]
    assert found["pair"].right[0].shape == ()
    for name in ("half", "mask", "none"):
        assert found[name].dtype is batch[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(found[name], batch[name])  # type: ignore[arg-type]
    assert np.array_equal(found["array"], batch["array"])  # type: ignore[arg-type]
    assert found["array"].dtype == np.int16
    assert found["plain"] == batch["plain"]
    found["half"].add_(1.0)  # may be written to


LEAVES = some.one_of(
    some.integers(),
    some.floats(allow_nan=False),
    some.text(max_size=4),
    some.booleans(),
    some.none(),
)
TREES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.lists(inner, max_size=3).map(tuple)
        | some.dictionaries(some.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(TREES)
def test_containers_and_plain_values_are_the_same_and_of_the_same_types(tree: Any) -> None:
    found = sent(tree)
    assert found == tree
    assert type(found) is type(tree)


@pytest.mark.parametrize(
    "batch",
    [
        object(),
        [{1, 2}],
        {1: "a key that is no text"},
        np.array([object()]),
        torch.eye(2).to_sparse(),
        OrderedDict(x=1),
        np.zeros(2, dtype=[("x", "f4")]),
    ],
    ids=["object", "set", "key", "objects", "sparse", "a kind of dict", "fields"],
)
def test_what_does_not_travel_is_named(batch: Any) -> None:
    with pytest.raises(UnpackableError, match="a batch holds a"):
        packed(batch, [])


@pytest.mark.parametrize(
    "told",
    [
        {"tensor": 1, "dtype": "float32", "shape": [1]},
        {"tensor": 0, "dtype": "float33", "shape": [1]},
        {"tensor": 0, "dtype": "float32", "shape": [7]},
        {"array": 0, "dtype": "|O", "shape": [1]},
        {"named": "os:system", "parts": []},
        {"named": "nowhere:Pair", "parts": []},
        {"named": f"{__name__}:NotAPair", "parts": [{"plain": 1}, {"plain": 2}]},
        {"plain": {}},
        None,
    ],
    ids=str,
)
def test_what_is_no_batch_is_refused(told: Mapping[str, Any] | None) -> None:
    with pytest.raises(TransportError, match="no batch"):
        unpacked(told, [np.zeros(4, np.uint8)])
