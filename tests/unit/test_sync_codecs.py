"""Codecs: what comes back, what stays behind, and what old codes decode to."""

from __future__ import annotations

import hashlib
import math
from itertools import product

import pytest
import torch

from raycloud.sync.codecs import CODECS, Codec, _Rows

COUNTS = (1, 127, 128, 129, 1000, 131072, 131073, 300_000)
LOSSY = tuple(codec for name, codec in CODECS.items() if name != "none")


def coded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """The codes of `values`, in memory that held something else."""
    codes = torch.full((codec.bound(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values, codes)
    return codes


def decoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """What the codes of `values` stand for."""
    found = torch.zeros_like(values)
    codec.add(coded(codec, values), found)
    return found


def normal(count: int, *, seed: int = 0) -> torch.Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "most"), [("none", 0.0), ("bf16", 2**-8), ("int8", 0.008), ("int4", 0.13)]
)
def test_what_comes_back_is_near(name: str, most: float, count: int) -> None:
    values = normal(count) * 1e-3
    lost = decoded(CODECS[name], values) - values
    assert float(lost.norm()) <= most * float(values.norm())


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("count", [0, *COUNTS])
def test_code_and_residual_make_the_values(codec: Codec, count: int) -> None:
    values = normal(count)
    codes, residual = coded(codec, values), values.clone()
    codec.subtract(codes, residual)
    codec.add(codes, residual)
    torch.testing.assert_close(residual, values, rtol=0, atol=2e-6)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_sums_of_codes_are_sums_of_what_they_stand_for(codec: Codec) -> None:
    one, other = normal(5000), normal(5000, seed=1)
    total = torch.zeros(5000)
    for values in (one, other):
        codec.add(coded(codec, values), total)
    assert torch.equal(total, decoded(codec, one) + decoded(codec, other))


@pytest.mark.parametrize("codec", LOSSY, ids=[codec.name for codec in LOSSY])
@pytest.mark.parametrize("size", [1e-37, 1e-18, 1e-7, 1.0, 1e18, 1e38])
def test_size_of_values_does_not_matter(codec: Codec, size: float) -> None:
    values = normal(1000).clamp(-3, 3)
    lost = decoded(codec, values * size) / size - values
    usual = decoded(codec, values) - values
    assert float(lost.norm()) <= 1.5 * float(usual.norm())


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_a_value_that_is_not_finite_is_not_lost(codec: Codec) -> None:
    for at, bad in product(range(0, 1000, 111), (math.nan, math.inf, -math.inf)):
        values = normal(1000)
        values[at] = bad
        assert not decoded(codec, values).isfinite().all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    assert not decoded(codec, torch.zeros(1000)).any()


@pytest.mark.parametrize("codec", LOSSY, ids=[codec.name for codec in LOSSY])
def test_decoding_rounds_once(codec: Codec) -> None:
    """Products are exact in fp32, so a fused multiply-add elsewhere gives the same bits."""
    values = normal(4096)
    codes = coded(codec, values)
    if codec.name == "bf16":
        return
    block, head = (256, 4) if codec.name == "int8" else (32, 4)
    rows = codes[head:].view(values.numel() // block, -1)
    if codec.name == "int8":
        scales, offsets = rows[:, -8:].contiguous().view(torch.float32).double().unbind(1)
        numbers = rows[:, :-8].double()
    else:
        scales, offsets = rows[:, -4:].contiguous().view(torch.float16).double().unbind(1)
        numbers = torch.stack((rows[:, :-4] & 15, rows[:, :-4] >> 4), 2).flatten(1).double()
    products = numbers * scales[:, None]
    assert torch.equal(products.float().double(), products)
    exact = (products + offsets[:, None]).float().flatten()
    assert torch.equal(decoded(codec, values), exact)


ROWS = tuple(codec for codec in CODECS.values() if isinstance(codec, _Rows))


@pytest.mark.parametrize("codec", ROWS, ids=[codec.name for codec in ROWS])
@pytest.mark.parametrize("count", [1, 1000, 131073])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1.0, 1e6])
def test_operators_of_other_devices_decode_the_same_bits(
    codec: _Rows, count: int, size: float
) -> None:
    values = normal(count) * size
    there = decoded(codec, values)
    assert torch.equal(codec.decode_by_operators(coded(codec, values), count), there)
    codes = codec.encode_by_operators(values)
    assert len(codes) == codec.bound(count)
    back = torch.zeros(count)
    codec.add(codes, back)
    assert torch.equal(codec.decode_by_operators(codes, count), back)
    lost, usual = (back - values).norm(), (there - values).norm()
    assert float(lost) <= 1.05 * float(usual) + 1e-3 * size


@pytest.mark.parametrize("codec", ROWS, ids=[codec.name for codec in ROWS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_operators_lose_nothing_that_is_not_finite(codec: _Rows, bad: float) -> None:
    values = normal(1000)
    values[333] = bad
    assert not codec.decode_by_operators(codec.encode_by_operators(values), 1000).isfinite().all()


GOLDEN = {
    "none": "c027e1de3b130a92",
    "bf16": "af987f274869890d",
    "int8": "5f2b719f16e62cc7",
    "int4": "98fe957837b306bb",
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_golden_codes(codec: Codec) -> None:
    """Members of one generation may run different builds of torch: codes may not change."""
    values = (torch.arange(-300, 301, dtype=torch.float32) / 64).sin() * 3
    digest = hashlib.sha256(coded(codec, values).numpy().tobytes()).hexdigest()[:16]
    assert digest == GOLDEN[codec.name]
