"""A manifest's bytes: whatever is wrong in them is refused, and no damage goes unnoticed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.checkpoint import DamagedError, Manifest, Store, latest, load, open_store
from raycloud.errors import CheckpointError
from tests.checkpoints import GOLDEN, memory_store, save


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path) if request.param == "local" else memory_store()


def wrapped(plain: Any) -> bytes:
    """A manifest whose digest fits whatever it holds."""
    body = json.dumps(plain).encode()
    head = b'{"digest": "sha256:' + hashlib.sha256(body).hexdigest().encode()
    return head + b'", "manifest": ' + body + b"}\n"


def test_a_newer_format_is_refused_and_not_passed_over(store: Store) -> None:
    content = save(store, 1).to_bytes()
    plain = json.loads(content)["manifest"]
    assert wrapped(plain) == content
    store.write("step-00000002/manifest.json", [wrapped({"format": 4, "else": True})])
    with pytest.raises(CheckpointError, match="has format 4; this raycloud reads 1 to 3") as caught:
        latest(store)
    assert not isinstance(caught.value, DamagedError)
    assert "version" in caught.value.hint


def test_a_manifest_of_another_step_is_refused(store: Store) -> None:
    content = save(store, 1).to_bytes()
    store.write("step-00000002/manifest.json", [content])
    with pytest.raises(DamagedError, match="manifest of step 1"):
        load(store, 2)


def test_a_manifest_over_the_limit_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = tmp_path / "step-00000001" / "manifest.json"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(32 * 2**20 + 1)  # sparse
    with pytest.raises(DamagedError, match="over 33554432"):
        load(store, 1)


def _set(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = to

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        del plain[path[-1]]

    return change


def _swap(plain: Any) -> None:
    plain["parts"].reverse()


def _twice(plain: Any) -> None:
    plain["parts"][1]["tensors"] = plain["parts"][0]["tensors"]


def _part_file(name: str) -> Callable[[Any], None]:
    return _set("parts", 0, "file", to=name)


WEIGHT = ("parts", 0, "tensors", "parameter/layer.weight")
BAD_MANIFESTS: list[tuple[Callable[[Any], None], str]] = [
    (_set("format", to="1"), "format: Input should be a valid integer"),
    (_set("format", to=0), "format: Input should be greater than or equal to 1"),
    (_drop("format"), "format: Input should be a valid integer"),
    (_drop("ledger"), "ledger: Field required"),
    (_set("extra", to=1), "extra: Unexpected keyword argument"),
    (_set("step", to=-1), "step: Input should be greater than or equal to 0"),
    (_set("step", to=True), "step: Input should be a valid integer"),
    (_set("step", to=1.0), "step: Input should be a valid integer"),
    (_set("step", to=8), r"parts\[0\].file is not 'step-00000008/part-0-of-2.safetensors'"),
    (_set("offset", to="0"), "offset: Input should be a valid integer"),
    (_set("epoch", to=10**400), "epoch: Input should be less than or equal to 9007199254740992"),
    (_set("generation", to=None), "generation: Input should be a valid integer"),
    (_set("job", to=[]), "job: Input should be a valid dictionary"),
    (_set("values", "groups", to={"~pickle": "x"}), r"values\['groups'\] has the unknown tag"),
    (_set("torch_version", to=2), "torch_version: Input should be a valid string"),
    (_set("parts", to={}), "parts: Input should be a valid tuple"),
    (_set("parts", to=[]), "parts is empty"),
    (_set("parts", 1, to=None), r"parts\[1\]: Input should be a dictionary"),
    (_drop("parts", 1), r"parts\[0\].file is not 'step-00000007/part-0-of-1"),
    (_swap, r"parts\[0\].file is not"),
    (_set("parts", 1, "position", to=0), "parts are not each of another replica and position"),
    (_set("parts", 0, "replica", to=1), "parts are not each of another replica and position"),
    (_set("parts", 1, "position", to=-1), r"parts\[1\].position: Input should be greater"),
    (_drop("parts", 1, "replica"), r"parts\[1\].replica: Field required"),
    (_twice, "has 'buffer/steps', which parts.0. has as well"),
    (_part_file("../../etc/passwd"), "'../../etc/passwd', not part 0 of 2"),
    (_part_file("/etc/passwd"), "'/etc/passwd', not part 0 of 2"),
    (_part_file("step-00000007/../x"), "not part 0 of 2"),
    (_part_file("step-00000006/part-0-of-2.safetensors"), "is not"),
    (_part_file("step-00000007/part-0-of-3.safetensors"), "not part 0 of 2"),
    (_part_file("step-7/part-0-of-2.safetensors"), "not part 0 of 2"),
    (_set("parts", 0, "rank", to=2), "not part 2 of 2"),
    (_set("parts", 0, "parts", to=10**9), "parts: Input should be less than or equal to 65536"),
    (_set("parts", 0, "sha256", to="A" * 64), "sha256: String should match pattern"),
    (_set("parts", 0, "sha256", to="a" * 63), "sha256: String should match pattern"),
    (_set("parts", 0, "bytes", to=3), "bytes is 3, with 32 bytes of tensors"),
    (_set("parts", 0, "bytes", to=2**60), "bytes: Input should be less"),
    (_set("parts", 0, "bytes", to=2**40), "with 32 bytes of tensors"),
    (_set(*WEIGHT, "dtype", to="PICKLE"), "dtype: String should match pattern"),
    (_set(*WEIGHT, "shape", to=[2**40, 2**40]), "with .* bytes of tensors"),
    (
        _set(*WEIGHT, "shape", to=[-2, -3]),
        r"shape\[0\]: Input should be greater",
    ),
    (_set(*WEIGHT, "shape", to=[1] * 65), "shape: Tuple should have at most 64 items"),
    (_set(*WEIGHT, "shape", to="23"), "shape: Input should be a valid tuple"),
    (_drop(*WEIGHT, "shape"), "shape: Field required"),
    (
        _set("parts", 0, "tensors", "", to={"dtype": "F32", "shape": []}),
        "tensors.*String should have at least 1 character",
    ),
]


@pytest.mark.parametrize(("change", "problem"), BAD_MANIFESTS)
def test_manifests_that_are_wrong_inside_are_refused(
    change: Callable[[Any], None], problem: str
) -> None:
    store = memory_store()
    plain = copy.deepcopy(json.loads(save(store, 7).to_bytes())["manifest"])
    change(plain)
    with pytest.raises(CheckpointError, match=problem) as caught:
        Manifest.from_bytes(wrapped(plain))
    assert caught.value.hint


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b"{", b'{"format": NaN}', b"[" * 100_000, b"\xff", b"9" * 5000]
)
def test_bodies_that_are_not_a_manifest_are_refused(body: bytes) -> None:
    head = b'{"digest": "sha256:' + hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(head + b'", "manifest": ' + body + b"}\n")


@given(data=st.data())
def test_every_flip_and_truncation_of_a_manifest_is_noticed(data: st.DataObject) -> None:
    content = bytearray((GOLDEN / "step-00000003" / "manifest.json").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    with pytest.raises(DamagedError, match="digest differs"):
        Manifest.from_bytes(bytes(content))


def test_the_head_and_tail_of_a_manifest_are_covered_too() -> None:
    content = (GOLDEN / "step-00000003" / "manifest.json").read_bytes()
    for at in [*range(120), *range(len(content) - 20, len(content))]:
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            with pytest.raises(DamagedError):
                Manifest.from_bytes(bytes(flipped))
