"""Tensors in a row: any cut of their bytes puts the same tensors together again."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from raycloud.recovery.receiving import Row, described, room_for
from tests.sockets import alike

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Of any type and shape, also without elements or dimensions, some not in one piece."""
    made = {}
    for k in range(draw(st.integers(0, 8))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        one = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(k))
        one = one.to(draw(st.sampled_from(DTYPES)))
        made[f"t{k}"] = one.mT if one.dim() > 1 and draw(st.booleans()) else one
    return made


@given(tensors(), st.data())
def test_any_cut_brings_all_bytes_once(whole: dict[str, torch.Tensor], data: st.DataObject) -> None:
    row, room = Row(whole.values()), room_for({"tensors": described(whole)})
    other = Row(room.values())
    assert other.size == row.size == sum(t.numel() * t.element_size() for t in whole.values())
    cuts = data.draw(st.lists(st.integers(0, row.size), max_size=6))
    for start, stop in data.draw(
        st.permutations(list(itertools.pairwise(sorted([0, *cuts, row.size]))))
    ):
        piece, at = row.read(start, stop), 0
        assert len(piece) == stop - start
        for place in other.places(start, stop):
            place[:] = piece[at : at + len(place)]
            at += len(place)
        assert at == len(piece)
    assert alike(room, whole)
