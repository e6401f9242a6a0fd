"""Checkpoints: published, found again, passed over when damaged, retained, moved."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from raycloud.checkpoint import (
    DamagedError,
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
from tests.checkpoints import (
    GOLDEN,
    GOLDEN_2,
    GOLDEN_3,
    HELD,
    assert_holds,
    damage,
    drafts,
    manifest_of,
    memory_store,
    save,
    tensors_of,
)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path) if request.param == "local" else memory_store()


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
    store.remove_all(["step-00000001/part-1-of-2.safetensors"])
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
    store.remove_all([parts[1]["file"]])
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
        store.remove_all([name])
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


def test_retain_keeps_the_newest(store: Store) -> None:
    for step in (100, 200, 300, 400):
        save(store, step)
    assert retain(store, 2) == (100, 200)
    assert retain(store, 2) == ()
    assert steps(store) == [300, 400]
    assert {name.split("/")[0] for name in store.names()} == {"step-00000300", "step-00000400"}
    for step in (300, 400):
        assert_holds(store, load(store, step))


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
    assert [name.split("/")[0] for name in drafts(store)] == ["step-00000300", "step-00000350"]
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


@pytest.mark.parametrize(("place", "number"), [(GOLDEN, 1), (GOLDEN_2, 2), (GOLDEN_3, 3)])
def test_the_golden_checkpoints_load_and_are_rewritten_byte_for_byte(
    place: Path, number: int, tmp_path: Path
) -> None:
    golden = open_store(place)
    found = latest(golden)
    assert found.manifest is not None
    assert found.skipped == ()
    assert found.manifest.format == number
    assert_holds(golden, found.manifest)
    assert found.manifest.values["groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.95), "best": float("inf")}
    ]
    assert found.manifest.values.get("held") == (HELD if number > 1 else None)
    keys = [(part.replica, part.position) for part in found.manifest.parts]
    assert keys == ([(0, 0), (0, 1)] if number == 3 else [(0, 0), (1, 0)])
    fresh = open_store(tmp_path)
    assert save(fresh, 3, number=number) == found.manifest
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
