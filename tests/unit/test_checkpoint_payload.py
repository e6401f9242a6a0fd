"""How far two checkpoints are apart."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from raycloud.checkpoint import DamagedError, PartRecord, Store, open_store, split_names
from raycloud.checkpoint.payload import compared, difference, read_part, write_part
from raycloud.errors import CheckpointError, InternalError, TaskError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def raw(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.view(tensor.shape).copy_(tensor.detach())
    return dense.view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, raw(a)) == (b.dtype, b.shape, raw(b))


def every_kind() -> dict[str, torch.Tensor]:
    bits = torch.arange(64, dtype=torch.uint8).repeat(6)
    tensors = {str(dtype): bits.view(dtype).clone() for dtype in DTYPES if dtype != torch.bool}
    tensors["flags"] = torch.tensor([True, False, True])
    tensors["nan"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    tensors["bf16 scalar"] = torch.tensor(-1.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(0)
    tensors["empty 3d"] = torch.empty(2, 0, 3, dtype=torch.int64)
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["strided"] = torch.arange(20)[::3]
    tensors["expanded"] = torch.tensor([1.0, 2.0]).expand(3, 2)
    tensors["offset"] = torch.arange(10, dtype=torch.int16)[3:7]
    tensors["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors["negated"] = torch.tensor([1 + 2j]).conj().imag
    tensors["one of a stride"] = torch.arange(6.0)[1::5]
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2, 2))
    tensors['odd "name" \u00e4\u4e2d'] = torch.ones(1)
    return tensors


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_every_kind_of_tensor_comes_back_bit_for_bit(store: Store) -> None:
    tensors = every_kind()
    plain = write_part(store, step=200, rank=0, parts=2, tensors=tensors)
    assert plain["file"] == "step-00000200/part-0-of-2.safetensors"
    assert json.loads(json.dumps(plain)) == plain
    assert PartRecord.parse(plain).to_plain() == plain
    back = read_part(store, plain)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert same(back[name], tensor), name
    back["scalar"] += 1  # it owns its memory


def test_the_file_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    tensors = every_kind()
    plain = write_part(store, step=1, rank=0, parts=1, tensors=tensors)
    content = (tmp_path / plain["file"]).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (plain["bytes"], plain["sha256"])
    read = load_safetensors(content)
    dense = {n: t.detach().resolve_conj().resolve_neg().contiguous() for n, t in tensors.items()}
    theirs = load_safetensors(save_safetensors(dense))
    assert all(same(read[name], theirs[name]) for name in tensors)
    with safe_open(tmp_path / plain["file"], "pt") as file:
        assert file.metadata() == {"raycloud.format": "1"}


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    plain = write_part(open_store(tmp_path), step=1, rank=0, parts=1, tensors=every_kind())
    content = (tmp_path / plain["file"]).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in every_kind().items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = every_kind()
    one = write_part(open_store(tmp_path / "a"), step=1, rank=0, parts=1, tensors=tensors)
    other = dict(reversed(tensors.items()))
    two = write_part(open_store(tmp_path / "b"), step=1, rank=0, parts=1, tensors=other)
    assert one == two


class _Watching:
    """A store that looks at the chunks it is given."""

    place = "nowhere"

    def __init__(self) -> None:
        self.addresses: list[tuple[int, int]] = []

    def write(self, name: str, chunks: Any) -> None:
        del name
        for chunk in chunks:
            if isinstance(chunk, memoryview):
                view = torch.frombuffer(chunk, dtype=torch.uint8)
                self.addresses.append((view.data_ptr(), len(chunk)))


def test_tensors_are_written_from_their_own_memory() -> None:
    tensor = torch.arange(1_000_000, dtype=torch.float32)
    watching = _Watching()
    write_part(watching, step=1, rank=0, parts=1, tensors={"a": tensor})  # type: ignore[arg-type]
    start = tensor.data_ptr()
    assert watching.addresses[0][0] == start
    assert all(start <= at < start + 4_000_000 for at, _ in watching.addresses)
    assert sum(size for _, size in watching.addresses) == 4_000_000
    assert max(size for _, size in watching.addresses) <= 2**20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_tensors_come_back_on_the_cpu(store: Store) -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4).t()
    back = read_part(store, write_part(store, step=1, rank=0, parts=1, tensors={"a": tensor}))
    assert same(back["a"], tensor.cpu())


def test_a_part_may_be_empty(store: Store) -> None:
    assert read_part(store, write_part(store, step=1, rank=1, parts=2, tensors={})) == {}


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("a", torch.ones(1, dtype=torch.complex128), "'a' .*complex128.* cannot be written"),
        ("a", torch.ones(2, 2).to_sparse(), "'a' .*sparse.* cannot be written"),
        ("a", torch.ones(1, device="meta"), "'a' .*meta.* cannot be written"),
        ("", torch.ones(1), "'' cannot name a tensor"),
        ("__metadata__", torch.ones(1), "'__metadata__' cannot name a tensor"),
        ("a\n", torch.ones(1), "cannot name a tensor"),
        ("\ud800", torch.ones(1), "cannot name a tensor"),
        ("a" * 5000, torch.ones(1), "cannot name a tensor"),
    ],
)
def test_what_cannot_be_stored_is_named(
    store: Store, name: str, tensor: torch.Tensor, problem: str
) -> None:
    with pytest.raises(TaskError, match=problem):
        write_part(store, step=1, rank=0, parts=1, tensors={name: tensor})
    assert store.names() == []


def test_ranks_are_checked(store: Store) -> None:
    with pytest.raises(InternalError):
        write_part(store, step=1, rank=2, parts=2, tensors={})


@given(data=st.data())
def test_every_damage_is_noticed_before_parsing(data: st.DataObject) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    plain = write_part(store, step=1, rank=0, parts=1, tensors=every_kind())
    content = bytearray(store.read(plain["file"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif data.draw(st.booleans()):
        del content[at:]
    else:
        content += content[at:]
    store.write(plain["file"], [bytes(content)])
    with pytest.raises(DamagedError, match=r"digest differs|bytes, not"):
        read_part(store, plain)


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (_explode, ())


exploded: list[bool] = []


def _explode() -> None:
    exploded.append(True)


def test_a_pickle_in_place_of_a_part_is_refused_and_not_executed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    plain = write_part(store, step=1, rank=0, parts=1, tensors={"a": torch.ones(100)})
    content = pickle.dumps(_Bomb()).ljust(plain["bytes"], b"\0")
    (tmp_path / plain["file"]).write_bytes(content)
    with pytest.raises(DamagedError, match="digest differs"):
        read_part(store, plain)
    # Even where the manifest was forged to fit.
    forged = plain | {"sha256": hashlib.sha256(content).hexdigest()}
    with pytest.raises(DamagedError, match="not a safetensors file"):
        read_part(store, forged)
    assert exploded == []


def test_a_part_with_other_tensors_than_recorded_is_refused(store: Store) -> None:
    plain = write_part(store, step=1, rank=0, parts=1, tensors={"a": torch.ones(2, 3)})
    for tensors in (
        {"a": {"dtype": "F32", "shape": [3, 2]}},
        {"a": {"dtype": "I32", "shape": [2, 3]}},
        {"b": {"dtype": "F32", "shape": [2, 3]}},
    ):
        with pytest.raises(DamagedError, match="other tensors"):
            read_part(store, plain | {"tensors": tensors})


@given(
    sizes=st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30),
    parts=st.integers(1, 6),
    shuffle=st.randoms(),
)
def test_names_are_split_evenly_and_always_alike(
    sizes: dict[str, int], parts: int, shuffle: Any
) -> None:
    split = split_names(sizes, parts)
    assert len(split) == parts
    assert sorted(name for names in split for name in names) == sorted(sizes)
    other = list(sizes.items())
    shuffle.shuffle(other)
    assert split_names(dict(other), parts) == split
    loads = [sum(sizes[name] for name in names) for names in split]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    if not any(sizes.values()):
        counts = [len(names) for names in split]
        assert max(counts) - min(counts) <= 1


def state(**changes: Any) -> dict[str, torch.Tensor]:
    tensors = {
        "model/weight": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "model/count": torch.tensor(3),
        "optimizer/weight/exp_avg": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "optimizer/weight/step": torch.tensor(7.0),
    }
    return tensors | {name.replace("__", "/"): value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "largest", "tensor", "parameters"),
    [
        ({}, 0.0, "model/count", 0.0),
        ({"model__count": torch.tensor(5)}, 2.0, "model/count", 2.0),
        (
            {
                "model__weight": torch.tensor([1.0, 2.25], dtype=torch.float64),
                "optimizer__weight__exp_avg": torch.tensor([1.0, 0.25], dtype=torch.float64),
            },
            *(0.5, "optimizer/weight/exp_avg", 0.25),
        ),
        (
            {"model__weight": torch.tensor([math.nan, 2.0], dtype=torch.float64)},
            *(math.inf, "model/weight", math.inf),
        ),
    ],
)
def test_the_largest_difference_is_found_and_named(
    changes: dict[str, torch.Tensor], largest: float, tensor: str, parameters: float
) -> None:
    found = compared(state(), state(**changes), step=4)
    assert (found.largest, found.tensor, found.parameters) == (largest, tensor, parameters)
    assert (found.tensors, found.step, found.precision) == (4, 4, "float64")


def test_the_least_precise_parameter_counts() -> None:
    less = state(model__bias=torch.zeros(2, dtype=torch.bfloat16), model__scale=torch.zeros(2))
    assert compared(less, less, step=4).precision == "bfloat16"


def test_other_names_or_shapes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"only one of the two .* 'model/bias'"):
        compared(state(), state(model__bias=torch.zeros(2)), step=4)
    with pytest.raises(CheckpointError, match="'model/weight' has two shapes"):
        compared(state(), state(model__weight=torch.zeros(3)), step=4)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        difference(open_store(str(tmp_path / "a")), open_store(str(tmp_path / "b")))
