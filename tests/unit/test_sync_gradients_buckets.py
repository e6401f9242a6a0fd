"""The layout of buckets depends on the parameters alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raycloud.sync.buckets import lay_out

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
