"""`jobs/cifar.py` and `jobs/gpt.py` on tiny data: rows, batches, metrics, and what they refuse."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from raycloud import load_job
from raycloud.errors import DataError
from raycloud.on_ray.tasks import resolve
from raycloud.rows import Rows
from raycloud.task import Source
from tests.jobs import JOBS, measured, rng, task_of, updates


@pytest.mark.parametrize("name", ["cifar", "clicks", "gpt", "rings"])
def test_the_model_can_be_made_without_memory(name: str) -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in task_of(name).model().parameters())


# --- cifar ---


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pictures(count: int, size: int = 32) -> np.ndarray:
    return rng().integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def test_cifar_decodes_images_and_keeps_labels() -> None:
    pixels = pictures(3)
    rows = Rows({"image": [png(p) for p in pixels], "label": np.array([3, 0, 9])})
    made = task_of("cifar").preprocess(rows)
    assert np.array_equal(made["image"], pixels)
    assert made["image"].dtype == np.uint8
    assert made["label"].tolist() == [3, 0, 9]


def test_cifar_takes_columns_as_the_hugging_face_hub_has_them() -> None:
    job = load_job(JOBS / "cifar.yaml", overrides=["settings.image=img"])
    task = resolve(job)(**job.settings)
    pixels = pictures(2)
    structs = [{"bytes": png(p), "path": "x.png"} for p in pixels]
    table = pa.table({"img": structs, "label": pa.array([1, 2], pa.int64())})
    made = task.preprocess(Rows.from_table(table))
    assert np.array_equal(made["image"], pixels)


def test_cifar_brings_images_of_other_sizes_to_its_own() -> None:
    rows = Rows({"image": [png(pictures(1, size)[0]) for size in (40, 32)], "label": np.zeros(2)})
    assert task_of("cifar").preprocess(rows)["image"].shape == (2, 32, 32, 3)


def test_cifar_refuses_what_is_no_image() -> None:
    rows = Rows({"image": [png(pictures(1)[0]), b"<html>"], "label": np.zeros(2)})
    with pytest.raises(ValueError, match="image 1 cannot be decoded"):
        task_of("cifar").preprocess(rows)


@pytest.mark.parametrize("label", [-1, 10])
def test_cifar_refuses_a_label_outside(label: int) -> None:
    rows = Rows({"image": [png(pictures(1)[0])], "label": np.array([label])})
    with pytest.raises(ValueError, match=f"label {label} is not one of 0 to 9"):
        task_of("cifar").preprocess(rows)


def test_cifar_splits_by_the_names_of_files(tmp_path: Path) -> None:
    splits = task_of("cifar").data(str(tmp_path))
    assert isinstance(splits.train, Source)
    assert isinstance(splits.held_out, Source)
    names = ["train-0.parquet", "a/cifar10-train-1.parquet", "test.parquet", "train/test-0.parquet"]
    assert [splits.train.select(n) for n in names] == [True, True, False, False]
    assert [splits.held_out.select(n) for n in names] == [False, False, True, True]


def test_cifar_says_what_data_it_needs() -> None:
    with pytest.raises(DataError, match="cifar has no images of its own") as refused:
        task_of("cifar").data(None)
    for part in ("--set data.path=", "Parquet", "'image'", "'label'", "CIFAR-10"):
        assert part in refused.value.hint


def test_cifar_moves_and_mirrors_images_by_the_given_generator() -> None:
    task, pixels = task_of("cifar"), pictures(64)
    rows = Rows({"image": pixels, "label": np.arange(64) % 10})
    first, again, other = (task.batch(rows, rng(s))["image"].numpy() for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == pixels.shape
    moves = [_move_of(before, after) for before, after in zip(pixels, first, strict=True)]
    assert {mirrored for _, _, mirrored in moves} == {False, True}
    assert {down for down, _, _ in moves} == {right for _, right, _ in moves} == set(range(9))


def _move_of(before: np.ndarray, after: np.ndarray) -> tuple[int, int, bool]:
    """The one crop of the padded image that it is."""
    padded = np.pad(before, ((4, 4), (4, 4), (0, 0)))
    found = [
        (down, right, mirrored)
        for mirrored, seen in ((False, after), (True, after[:, ::-1]))
        for down in range(9)
        for right in range(9)
        if np.array_equal(padded[down : down + 32, right : right + 32], seen)
    ]
    assert len(found) == 1
    return found[0]


def test_cifar_leaves_held_out_images_as_they_are() -> None:
    pixels = pictures(5)
    rows = Rows({"image": pixels.copy(), "label": np.arange(5)})
    batch = task_of("cifar").batch(rows, None)
    assert np.array_equal(batch["image"].numpy(), pixels)
    assert batch["label"].tolist() == [0, 1, 2, 3, 4]


def test_cifar_learns_a_batch_and_measures_it() -> None:
    task = task_of("cifar")
    batch = task.batch(Rows({"image": pictures(20), "label": np.arange(20) % 10}), None)
    losses = updates(task, batch, 12)
    assert losses[0] > 2
    assert losses[-1] < 1.5
    metrics = measured(task, batch, 20)
    assert metrics["accuracy"] in [i / 20 for i in range(21)]
    assert metrics["loss"] == pytest.approx(np.log(10), abs=0.7)


def test_cifar_trains_at_a_rate_that_rises_and_falls() -> None:
    task = task_of("cifar")
    optimizer = task.optimizer(task.model())
    schedule = task.scheduler(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    peak = int(np.argmax(rates))
    assert 15 <= peak <= 25
    assert 0 < rates[0] < 0.1 * rates[peak]
    assert 0 < rates[-1] < 0.1 * rates[peak]
    assert rates == [*sorted(rates[: peak + 1]), *sorted(rates[peak + 1 :], reverse=True)]


# --- gpt ---


def test_gpt_packs_files_into_windows_of_bytes() -> None:
    job = load_job(JOBS / "gpt.yaml", overrides=["settings.length=4"])
    task = resolve(job)(**job.settings)
    made = task.preprocess(Rows({"text": ["abcde", "fö"], "path": ["a", "b"]}))
    assert [bytes(window) for window in made["window"]] == [b"abcde"]
    made = task.preprocess(Rows({"text": ["abcde", "föh!"], "path": ["a", "b"]}))
    assert [bytes(window) for window in made["window"]] == [b"abcde", "eföh".encode()]
    assert made["window"].dtype == np.uint8


def test_gpt_takes_texts_shorter_than_a_window() -> None:
    made = task_of("gpt").preprocess(Rows({"text": ["abc"], "path": ["a"]}))
    assert made["window"].shape == (0, 129)


def test_gpt_predicts_each_byte_from_those_before_it() -> None:
    task = task_of("gpt")
    windows = rng().integers(97, 101, (6, 129), dtype=np.uint8)
    batch = task.batch(Rows({"window": windows}), None)
    assert batch.dtype == torch.int64
    assert np.array_equal(batch.numpy(), windows)
    assert task.weight(batch, 6) == 6 * 128
    assert measured(task, batch, 6)["loss"] == pytest.approx(np.log(256), abs=1)
    losses = updates(task, batch, 60)
    assert losses[-1] < 0.5 * losses[0]
    assert task.sample(task.model().eval()).startswith("def ")


def test_gpt_reads_the_standard_library_unless_told() -> None:
    for path in (None, str(JOBS)):
        splits = task_of("gpt").data(path)
        assert isinstance(splits.train, Source)
        assert isinstance(splits.held_out, Source)
        assert splits.train.unit == splits.held_out.unit == "file"
