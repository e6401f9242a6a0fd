from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycloud.checkpoint import (
    DamagedError,
    Manifest,
    PartRecord,
    Store,
    latest,
    load,
    open_store,
    publish,
    retain,
    steps,
    verify,
)
from raycloud.checkpoint.payload import load_tensors, write_part
from raycloud.errors import CheckpointError, TaskError

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"


def tensors_of(step: int) -> list[dict[str, torch.Tensor]]:
    return [
        {
            "parameter/layer.weight": torch.arange(6.0).reshape(2, 3) + step,
            "buffer/steps": torch.tensor(step),
        },
        {
            "parameter/layer.bias": torch.tensor([0.5, -step], dtype=torch.bfloat16),
            "optimizer/layer.bias/exp_avg": torch.tensor([1 / 3, step], dtype=torch.float64),
        },
    ]


def manifest_of(step: int, parts: list[dict[str, Any]]) -> Manifest:
    return Manifest(
        step=step,
        epoch=1,
        offset=step * 32,
        generation=2,
        samples_per_epoch=1000,
        job={"format": 1, "task": "jobs/gpt.py:Gpt", "seed": 0},
        values={
            "random": {"seed": 7, "step": step},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "best": float("inf")}],
            "schedule": {"milestones": {3: 1}},
        },
        ledger={"epochs": [[0, [[0, 1000]]], [1, [[0, step * 32]]]]},
        parts=tuple(PartRecord.parse(part) for part in parts),
        raycloud_version="0.1.0",
        torch_version="2.13.0",
    )


def save(store: Store, step: int) -> Manifest:
    parts = [
        write_part(store, step=step, rank=rank, parts=2, tensors=tensors)
        for rank, tensors in enumerate(tensors_of(step))
    ]
    manifest = manifest_of(step, parts)
    publish(store, manifest)
    return manifest


def assert_holds(store: Store, manifest: Manifest) -> None:
    read = load_tensors(store, manifest)
    expected = {name: t for part in tensors_of(manifest.step) for name, t in part.items()}
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in read)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def damage(store: Store, name: str) -> None:
    content = bytearray(store.read(name))
    content[len(content) // 2] ^= 1
    store.write(name, [bytes(content)])


def test_publish_and_load(store: Store) -> None:
    assert steps(store) == []
    assert latest(store).manifest is None
    written = save(store, 200)
    save(store, 100)
    assert steps(store) == [100, 200]
    found = latest(store)
    assert found.manifest == written == load(store, 200)
    assert found.skipped == ()
    assert written.state_bytes == sum(store.size(part.file) for part in written.parts)
    assert_holds(store, written)
    verify(store, written)


def test_some_tensors_read_only_their_parts(store: Store) -> None:
    manifest = save(store, 1)
    store.remove("step-00000001/part-1-of-2.safetensors")
    assert set(load_tensors(store, manifest, ["buffer/steps"])) == {"buffer/steps"}
    with pytest.raises(DamagedError, match=r"part-1-of-2.* is missing"):
        load_tensors(store, manifest)
    with pytest.raises(CheckpointError, match=r"step 1 holds no tensor 'x' \(2 missing\)"):
        load_tensors(store, manifest, ["x", "y", "buffer/steps"])


def test_parts_without_a_manifest_are_not_a_checkpoint(store: Store) -> None:
    write_part(store, step=9, rank=0, parts=1, tensors={})
    assert steps(store) == []
    with pytest.raises(CheckpointError, match="no checkpoint of step 9") as caught:
        load(store, 9)
    assert "there are: none" in caught.value.hint


def test_nothing_is_published_before_all_parts_are_there(store: Store) -> None:
    parts = [
        write_part(store, step=5, rank=rank, parts=2, tensors=tensors)
        for rank, tensors in enumerate(tensors_of(5))
    ]
    store.remove(parts[1]["file"])
    with pytest.raises(DamagedError, match="is missing") as caught:
        publish(store, manifest_of(5, parts))
    assert "all nodes share" in caught.value.hint
    store.write(parts[1]["file"], [b"short"])
    with pytest.raises(DamagedError, match="has 5 bytes"):
        publish(store, manifest_of(5, parts))
    assert steps(store) == []


def test_state_that_does_not_fit_is_refused_by_key_path(store: Store) -> None:
    manifest = save(store, 1)
    bad = dataclasses.replace(manifest, values={"groups": [{"lr": torch.tensor(0.1)}]})
    with pytest.raises(TaskError, match=r"values\['groups'\]\[0\]\['lr'\] is a Tensor"):
        publish(store, bad)


@pytest.mark.parametrize("file", ["manifest.json", "part-1-of-2.safetensors"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "empty"])
def test_latest_goes_back_over_damage_and_says_so(store: Store, file: str, how: str) -> None:
    for step in (100, 200, 300):
        save(store, step)
    name = f"step-00000300/{file}"
    if how == "flip":
        damage(store, name)
    elif how == "remove":
        store.remove(name)
    else:
        store.write(name, [store.read(name)[:-1] if how == "truncate" else b""])
    damage(store, "step-00000200/part-0-of-2.safetensors")
    found = latest(store)
    assert found.manifest is not None
    assert found.manifest.step == 100
    assert_holds(store, found.manifest)
    expected = [200] if (file, how) == ("manifest.json", "remove") else [300, 200]
    assert [step for step, _ in found.skipped] == expected
    assert all(f"step-00000{step}" in reason for step, reason in found.skipped)


def test_sizes_only_leaves_damage_inside_a_part_to_loading(store: Store) -> None:
    save(store, 1)
    damage(store, "step-00000001/part-0-of-2.safetensors")
    found = latest(store, digests=False).manifest
    assert found is not None
    with pytest.raises(DamagedError, match="digest differs"):
        load_tensors(store, found)
    with pytest.raises(DamagedError, match="digest differs"):
        verify(store, found)


def test_what_cannot_be_reached_is_not_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, 1)
    save(store, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "manifest.json").symlink_to("manifest.json")
    with pytest.raises(CheckpointError) as caught:
        latest(store)
    assert not isinstance(caught.value, DamagedError)


def wrapped(plain: Any) -> bytes:
    """A manifest whose digest fits whatever it holds."""
    body = json.dumps(plain).encode()
    head = b'{"digest": "sha256:' + hashlib.sha256(body).hexdigest().encode()
    return head + b'", "manifest": ' + body + b"}\n"


def test_a_newer_format_is_refused_and_not_passed_over(store: Store) -> None:
    content = save(store, 1).to_bytes()
    plain = json.loads(content)["manifest"]
    assert wrapped(plain) == content
    store.write("step-00000002/manifest.json", [wrapped({"format": 2, "else": True})])
    with pytest.raises(CheckpointError, match="has format 2; this raycloud reads 1") as caught:
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
        file.truncate(64 * 2**20 + 1)  # sparse
    with pytest.raises(DamagedError, match="over 67108864"):
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
    (_set("format", to="1"), "format is a str"),
    (_set("format", to=0), "format is not from 1"),
    (_drop("format"), "format is a NoneType"),
    (_drop("ledger"), "lacks ledger"),
    (_set("extra", to=1), "unknown keys: extra"),
    (_set("step", to=-1), "step is not from 0"),
    (_set("step", to=True), "step is a bool"),
    (_set("step", to=1.0), "step is a float"),
    (_set("step", to=8), r"parts\[0\].file is not 'step-00000008/part-0-of-2.safetensors'"),
    (_set("offset", to="0"), "offset is a str"),
    (_set("epoch", to=10**400), "epoch is not from 0"),
    (_set("generation", to=None), "generation is a NoneType"),
    (_set("job", to=[]), "job is a list"),
    (_set("values", "groups", to={"~pickle": "x"}), r"values\['groups'\] has the unknown tag"),
    (_set("torch_version", to=2), "torch_version is a int"),
    (_set("parts", to={}), "parts is a dict"),
    (_set("parts", to=[]), "parts is empty"),
    (_set("parts", 1, to=None), r"parts\[1\] is a NoneType"),
    (_drop("parts", 1), r"parts\[0\].file is not 'step-00000007/part-0-of-1"),
    (_swap, r"parts\[0\].file is not"),
    (_twice, "has 'buffer/steps', which parts.0. has as well"),
    (_part_file("../../etc/passwd"), "'../../etc/passwd' is not a name"),
    (_part_file("/etc/passwd"), "'/etc/passwd' is not a name"),
    (_part_file("step-00000007/../x"), "is not a name"),
    (_part_file("step-00000006/part-0-of-2.safetensors"), "is not"),
    (_part_file("step-00000007/part-0-of-3.safetensors"), "not part 0 of 2"),
    (_part_file("step-7/part-0-of-2.safetensors"), "not part 0 of 2"),
    (_set("parts", 0, "rank", to=2), "rank is not from 0 to 1"),
    (_set("parts", 0, "parts", to=10**9), "parts is not from 1"),
    (_set("parts", 0, "sha256", to="A" * 64), "sha256 is not a SHA-256"),
    (_set("parts", 0, "sha256", to="a" * 63), "sha256 is not a SHA-256"),
    (_set("parts", 0, "bytes", to=3), "bytes is 3, with 32 bytes of tensors"),
    (_set("parts", 0, "bytes", to=2**60), "bytes is not from 0"),
    (_set("parts", 0, "bytes", to=2**40), "with 32 bytes of tensors"),
    (_set(*WEIGHT, "dtype", to="PICKLE"), "dtype is 'PICKLE', which is unknown"),
    (_set(*WEIGHT, "shape", to=[2**40, 2**40]), "is not from 0"),
    (_set(*WEIGHT, "shape", to=[-2, -3]), "shape is not from 0"),
    (_set(*WEIGHT, "shape", to=[1] * 65), "has 65 dimensions"),
    (_set(*WEIGHT, "shape", to="23"), "shape is a str"),
    (_drop(*WEIGHT, "shape"), "lacks shape"),
    (_set("parts", 0, "tensors", "", to={"dtype": "F32", "shape": []}), "a name of 0 characters"),
]


@pytest.mark.parametrize(("change", "problem"), BAD_MANIFESTS)
def test_manifests_that_are_wrong_inside_are_refused(
    change: Callable[[Any], None], problem: str
) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
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


def test_retain_keeps_the_newest(store: Store) -> None:
    for step in (100, 200, 300, 400):
        save(store, step)
    assert retain(store, 2) == (100, 200)
    assert retain(store, 2) == ()
    assert steps(store) == [300, 400]
    assert {name.split("/")[0] for name in store.names()} == {"step-00000300", "step-00000400"}
    for step in (300, 400):
        assert_holds(store, load(store, step))
    with pytest.raises(ValueError, match="keep >= 1"):
        retain(store, 0)


def test_retain_leaves_nothing_behind_but_what_is_being_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert retain(store, 1) == ()
    save(store, 200)
    save(store, 300)
    for step in (50, 250, 350):
        write_part(store, step=step, rank=0, parts=2, tensors={})
    for step in (50, 200, 300, 350):
        (tmp_path / f"step-{step:08d}" / "part-0-of-2.safetensors.0f.draft").write_bytes(b"half")
    store.write("notes.txt", [b"a person's own"])
    assert retain(store, 2) == ()
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "step-00000200",
        "step-00000300",
        "step-00000350",
    }
    assert [draft.split("/")[0] for draft in store.drafts()] == ["step-00000300", "step-00000350"]
    assert retain(store, 1) == (200,)
    assert steps(store) == [300]
    assert not (tmp_path / "step-00000200").exists()


def test_retain_does_not_count_damaged_checkpoints(store: Store) -> None:
    for step in (100, 200, 300, 400):
        save(store, step)
    store.write("step-00000300/manifest.json", [b"x"])
    store.write("step-00000400/part-0-of-2.safetensors", [b"x"])
    assert retain(store, 1) == (100,)
    assert steps(store) == [200, 300, 400]
    assert_holds(store, load(store, 200))


def test_retain_counts_from_the_step_just_published(store: Store) -> None:
    for step in (100, 200, 250, 300):
        save(store, step)
    damage(store, "step-00000300/part-0-of-2.safetensors")  # not visible by its size
    assert retain(store, 1, newest=250) == (100, 200)
    assert steps(store) == [250, 300]
    found = latest(store).manifest
    assert found is not None
    assert found.step == 250


def test_the_golden_checkpoint_loads_and_is_rewritten_byte_for_byte(tmp_path: Path) -> None:
    golden = open_store(GOLDEN)
    found = latest(golden)
    assert found.manifest is not None
    assert found.skipped == ()
    assert_holds(golden, found.manifest)
    assert found.manifest.values["groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.95), "best": float("inf")}
    ]
    fresh = open_store(tmp_path)
    assert save(fresh, 3) == found.manifest
    assert fresh.names() == golden.names()
    for name in golden.names():
        assert fresh.read(name) == golden.read(name), name
    assert found.manifest.to_bytes() == golden.read("step-00000003/manifest.json")


def test_a_checkpoint_may_be_moved(tmp_path: Path) -> None:
    save(open_store(tmp_path / "a"), 5)
    shutil.move(tmp_path / "a", tmp_path / "b")
    store = open_store(tmp_path / "b")
    found = latest(store).manifest
    assert found is not None
    assert_holds(store, found)
