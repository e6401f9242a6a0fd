"""Codecs: what comes back, what stays behind, and what old codes decode to."""

from __future__ import annotations

import hashlib
import math
from itertools import product

import pytest
import torch

from raycloud.spec.sizes import coded_bytes
from raycloud.sync.codecs import Codec, TopK, _Rows
from tests.coded import EVERY

COUNTS = (1, 127, 128, 129, 1000, 131072, 131073, 300_000)
LOSSY = tuple(codec for name, codec in EVERY.items() if name != "none")
RATIOS = (2, 4, 8, 16, 32, 64, 128, 256)


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
    ("name", "most"),
    [
        ("none", 0.0),
        ("bf16", 2**-8),
        ("int8", 0.008),
        ("int4", 0.13),
        ("int4-128", 0.16),
        ("topk", 0.94),
    ],
)
def test_what_comes_back_is_near(name: str, most: float, count: int) -> None:
    values = normal(count) * 1e-3
    lost = decoded(EVERY[name], values) - values
    assert float(lost.norm()) <= most * float(values.norm())


@pytest.mark.parametrize("codec", EVERY.values(), ids=list(EVERY))
@pytest.mark.parametrize("count", [0, *COUNTS])
def test_code_and_residual_make_the_values(codec: Codec, count: int) -> None:
    values = normal(count)
    codes, residual = coded(codec, values), values.clone()
    codec.subtract(codes, residual)
    codec.add(codes, residual)
    torch.testing.assert_close(residual, values, rtol=0, atol=2e-6)


@pytest.mark.parametrize("codec", EVERY.values(), ids=list(EVERY))
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


@pytest.mark.parametrize("codec", EVERY.values(), ids=list(EVERY))
def test_a_value_that_is_not_finite_is_not_lost(codec: Codec) -> None:
    for at, bad in product(range(0, 1000, 111), (math.nan, math.inf, -math.inf)):
        values = normal(1000)
        values[at] = bad
        assert not decoded(codec, values).isfinite().all()


@pytest.mark.parametrize("codec", EVERY.values(), ids=list(EVERY))
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    assert not decoded(codec, torch.zeros(1000)).any()


@pytest.mark.parametrize("codec", LOSSY, ids=[codec.name for codec in LOSSY])
def test_decoding_rounds_once(codec: Codec) -> None:
    """Products are exact in fp32, so a fused multiply-add elsewhere gives the same bits."""
    values = normal(4096)
    codes = coded(codec, values)
    if codec.name in {"bf16", "topk"}:  # it adds nothing
        return
    assert isinstance(codec, _Rows)
    rows = codes[4:].view(values.numel() // codec._block, -1)
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


ROWS = tuple(codec for codec in EVERY.values() if isinstance(codec, _Rows))


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


def test_bytes_foretold_are_those_of_codes() -> None:
    count = 2**20
    for name in ("bf16", "int8", "int4"):
        codec = EVERY[name]
        factors = 4 * 8 if isinstance(codec, _Rows) else 0
        assert coded_bytes(4 * count, name) + factors == codec.bound(count)
        assert coded_bytes(4 * count, name, pair=True) + factors == codec.for_pair.bound(count)


GOLDEN = {
    "none": "c027e1de3b130a92",
    "bf16": "af987f274869890d",
    "int8": "5f2b719f16e62cc7",
    "int4": "98fe957837b306bb",
    "int4-128": "22a4b308a6894130",
    "topk": "4aa0db88afb96619",
}


@pytest.mark.parametrize("name", EVERY)
def test_golden_codes(name: str) -> None:
    """Members of one generation may run different builds of torch: codes may not change."""
    values = (torch.arange(-300, 301, dtype=torch.float32) / 64).sin() * 3
    digest = hashlib.sha256(coded(EVERY[name], values).numpy().tobytes()).hexdigest()[:16]
    assert digest == GOLDEN[name]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("count", [1, 5, 255, 256, 4096, 4097, 70_001])
def test_top_k_keeps_the_largest_of_each_group_and_no_other(ratio: int, count: int) -> None:
    values, codec = normal(count), TopK(ratio)
    groups = -(-count // ratio)
    found, residual = decoded(codec, values), values.clone()
    codec.subtract(coded(codec, values), residual)
    rows = torch.nn.functional.pad(values, (0, groups * ratio - count)).view(ratio, groups)
    largest = rows.abs().argmax(0) * groups + torch.arange(groups)
    kept = torch.zeros(count, dtype=torch.bool)
    kept[largest] = True
    assert torch.equal(found != 0.0, kept)
    assert torch.equal(found[kept].sign(), values[kept].sign())
    assert torch.equal(residual[~kept], values[~kept])
    assert torch.equal(residual[kept], values[kept] - found[kept])
    sizes = torch.nn.functional.pad(rows.abs().amax(0), (0, -groups % 64)).view(-1, 64)
    told = torch.nn.functional.pad(found[largest].abs(), (0, -groups % 64)).view(-1, 64)
    torch.testing.assert_close(told.sum(1), sizes.sum(1), rtol=2**-8, atol=0)
    for block in told:
        assert len(block[block != 0.0].unique()) <= 2


@pytest.mark.parametrize("ratio", RATIOS)
def test_top_k_has_fewer_bytes(ratio: int) -> None:
    """Of a place its entropy, of a value two bits, and of 64 of them two sizes."""
    count, bits = 2**20, math.log2(ratio) + 2 + 32 / 64
    assert TopK(ratio).bound(count) == bits * count / ratio / 8
    assert coded_bytes(4 * count, "topk", ratio) == TopK(ratio).bound(count)


@pytest.mark.parametrize("seed", range(20))
def test_any_bits_are_a_code_of_top_k(seed: int) -> None:
    """Whoever has sent them: nothing is written beside the values."""
    generator = torch.Generator().manual_seed(seed)
    codec, count = TopK(RATIOS[seed % len(RATIOS)]), (1, 63, 2048, 4999)[seed % 4]
    codes = torch.randint(256, (codec.bound(count),), dtype=torch.uint8, generator=generator)
    memory = torch.full((count + 2000,), 7.0)
    codec.add(codes, memory[1000 : count + 1000])
    assert (memory[:1000] == 7.0).all()
    assert (memory[count + 1000 :] == 7.0).all()
    assert int((memory != 7.0).sum()) <= -(-count // RATIOS[seed % len(RATIOS)])


def test_top_k_sends_everything_in_the_end() -> None:
    """With error feedback: what is left does not grow."""
    codec, values, kept, sent = TopK(32), normal(10_000), torch.zeros(10_000), torch.zeros(10_000)
    norms = []
    for _ in range(400):
        kept += values
        codes = coded(codec, kept)
        codec.subtract(codes, kept)
        codec.add(codes, sent)
        norms.append(float(kept.norm()))
    assert norms[-1] <= 1.05 * max(norms[:200])
    torch.testing.assert_close(sent / 400, values, rtol=0, atol=0.2)
