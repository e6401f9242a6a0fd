from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from raycloud.checkpoint import DamagedError, decode, encode
from raycloud.errors import TaskError

# Doubles by their bits: every NaN, both zeros, subnormals.
floats = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), floats, st.floats(), st.text(max_size=8)
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.sampled_from(["~", "~tuple", "~float"]))


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=3)
    mappings = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        some, some.map(tuple), mappings, mappings.map(Counter), mappings.map(OrderedDict)
    )


def _same(a: object, b: object) -> bool:
    """Equal in type, order of keys, and every bit of every float."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, dict) and isinstance(b, dict):
        return _same([*a.items()], [*b.items()])
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@given(st.recursive(scalars, _nested, max_leaves=20))
@example({"~float": "x"})
@example({1: {"~": [(), ((),)]}, "1": -0.0})
def test_round_trip_through_json(value: object) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    assert _same(decode(json.loads(text)), value)


def test_plain_json_stays_plain() -> None:
    plain = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert encode(plain) == plain


def test_subclasses_come_back_plain() -> None:
    class Colour(enum.IntEnum):
        RED = 3

    class Word(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "other"

    made = encode({"a": Colour.RED, "b": np.float64(0.1), "c": Word("w"), "d": np.float64("inf")})
    assert _same(made, {"a": 3, "b": 0.1, "c": "w", "d": {"~float": "7ff0000000000000"}})


def test_a_schedule_and_an_optimizer_come_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    for state in (optimizer.state_dict()["param_groups"], schedule.state_dict()):
        assert _same(decode(json.loads(json.dumps(encode(state)))), state)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [0, {"b": torch.ones(1)}]}, r"state\['a'\]\[1\]\['b'\] is a Tensor: tensors belong"),
        ({3: np.float32(1)}, r"state\[3\] is a numpy.float32"),
        ({"a": np.int64(1)}, r"state\['a'\] is a numpy.int64"),
        ({"a": {1, 2}}, r"state\['a'\] is a builtins.set"),
        ([b"x"], r"state\[0\] is a builtins.bytes"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has a key \(1, 2\) of type tuple"),
        ({True: 1}, r"state has a key True of type bool"),
        ({"a": defaultdict(int)}, r"state\['a'\] is a defaultdict"),
        ([torch.Size([1])], r"state\[0\] is a Size: tensors belong"),
        ([2**5000], r"state\[0\] is an integer of more than 4096 bits"),
        (["\ud800\udc00"], r"state\[0\] is a string with half a character"),
        ({"\ud800": 1}, "half a character"),
        ([lambda: 0], r"state\[0\] is a builtins.function"),
    ],
)
def test_what_does_not_fit_is_named(value: object, problem: str) -> None:
    with pytest.raises(TaskError, match=problem) as caught:
        encode(value, where="state")
    assert "item()" in caught.value.hint


def test_loops_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TaskError, match="contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    "value",
    [
        {"~float": 1},
        {"~float": "7FF0000000000000"},
        {"~float": "7ff"},
        {"~tuple": 1},
        {"~tuple": {"a": 1}},
        {"~object": []},
        {"~dict": [], "a": 1},
        {"~dict": [[1]]},
        {"~dict": [[1.5, 2]]},
        {"~dict": [[True, 2]]},
        {"~dict": [[1, 2], [1, 3]]},
        {"~counter": {"a": 1}},
        {"~ordered": [{"a": 1}]},
    ],
)
def test_what_encode_never_writes_is_refused(value: object) -> None:
    with pytest.raises(DamagedError, match=r"state\['a'\]"):
        decode({"a": value}, where="state")


def test_depth_is_limited_both_ways() -> None:
    deep: list[object] = []
    for _ in range(64):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with pytest.raises(TaskError, match="deeper"):
        encode([deep])
    with pytest.raises(DamagedError, match="deeper"):
        decode([deep])


def test_not_a_number_keeps_its_bits() -> None:
    payload = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    made = decode(encode(payload))
    assert math.isnan(made)
    assert struct.pack(">d", made).hex() == "fff8000000000123"
