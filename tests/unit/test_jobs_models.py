"""`jobs/resnet.py`, `bert.py` and `multimodal.py`: rows, batches, shapes, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycloud import Task, load_job
from raycloud.errors import DataError
from raycloud.on_ray.tasks import resolve
from raycloud.rows import Rows
from raycloud.task import Source
from tests.jobs import JOBS, measured, module_of, rng, task_of, updates, weights_file

GOLDEN = Path(__file__).parent / "golden" / "bert"
NEW = ("resnet", "bert", "multimodal")


def made(name: str, **settings: Any) -> Task:
    """The task of a job with other settings."""
    job = load_job(JOBS / f"{name}.yaml")
    return resolve(job)(**(job.settings | settings))


def rows_of(source: Source) -> Rows:
    """Those of a table in hand."""
    assert isinstance(source.dataset, pa.Table)
    return Rows.from_table(source.dataset)


def batch_of(task: Task, count: int | None = None) -> Any:
    rows = rows_of(task.data(None).train)
    return task.batch(Rows(task.preprocess(rows[:count])), None)


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- all of them ---


@pytest.mark.parametrize("name", NEW)
def test_the_model_can_be_made_without_memory(name: str) -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in task_of(name).model().parameters())


@pytest.mark.parametrize("name", NEW)
def test_made_up_data_is_the_same_each_time_and_held_out_apart(name: str) -> None:
    first, again = (made(name, made_up=64).data(None) for _ in range(2))
    assert first.train.dataset.equals(again.train.dataset)
    assert first.train.key == again.train.key != first.held_out.key
    known = {repr(row) for row in first.train.dataset.to_pylist()}
    assert not known & {repr(row) for row in first.held_out.dataset.to_pylist()}
    assert first.held_out.dataset.num_rows == 16


@pytest.mark.parametrize(("name", "steps"), [("resnet", 20), ("bert", 120), ("multimodal", 40)])
def test_a_batch_is_learned_and_measured(name: str, steps: int) -> None:
    task = made(name, made_up=40)
    batch = batch_of(task, 24)
    losses = updates(task, batch, steps)
    assert losses[-1] < 0.7 * losses[0]
    metrics = measured(task, batch, 24)
    assert metrics["accuracy"] in [i / 24 for i in range(25)]
    assert metrics["loss"] == pytest.approx(losses[0], abs=2)


@pytest.mark.parametrize("name", ["resnet", "multimodal"])
def test_images_are_moved_by_the_given_generator_alone(name: str) -> None:
    task = made(name, made_up=40)
    rows = Rows(task.preprocess(rows_of(task.data(None).train)))
    still, first, again, other = (
        task.batch(rows, seed and rng(seed))["image"] for seed in (None, 1, 1, 2)
    )
    assert np.array_equal(still.numpy(), rows["image"])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == still.shape


# --- labels ---


def test_labels_are_numbers_or_names_of_a_list_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("cat\n dog\n\n")
    task = made("bert", labels=str(file))
    assert (task.labels, task.classes) == (("cat", "dog"), 2)
    rows = Rows({"text": ["a", "b", "c"], "label": ["dog", "cat", "dog"]})
    for one in (task, made("bert", labels=["cat", "dog"])):
        assert one.preprocess(rows)["label"].tolist() == [1, 0, 1]
    assert task.data(str(tmp_path)).train.types["label"] == "string"
    numbers = made("bert", classes=3)
    assert numbers.preprocess(Rows({"text": ["a"], "label": np.array([2])}))["label"].tolist() == [
        2
    ]
    assert numbers.data(str(tmp_path)).train.types["label"] == "int64"


@pytest.mark.parametrize(
    ("settings", "label", "why"),
    [
        ({"labels": ["cat"]}, "cow", r"label 'cow' is not in settings\.labels"),
        ({"classes": 3}, 3, "label 3 is not one of 0 to 2"),
        ({"classes": 3}, -1, "label -1 is not one of 0 to 2"),
    ],
)
def test_a_label_that_is_no_class_is_refused(
    settings: dict[str, Any], label: Any, why: str
) -> None:
    rows = Rows({"text": ["a"], "label": [label]})
    with pytest.raises(ValueError, match=why):
        made("bert", **settings).preprocess(rows)


@pytest.mark.parametrize("name", NEW)
def test_names_that_cannot_be_read_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"settings\.labels .*No such file") as refused:
        made(name, labels=str(tmp_path / "none.txt"))
    assert "a name a line" in refused.value.hint


# --- resnet ---


@pytest.mark.parametrize(
    ("depth", "size", "parameters"),
    [(18, 224, 11_689_512), (50, 224, 25_557_032), (18, 32, 11_681_832)],
)
def test_resnets_are_those_of_the_paper(depth: int, size: int, parameters: int) -> None:
    """Their parameters as they are published, with 1,000 classes; a small stem is 7,680 smaller."""
    with torch.device("meta"):
        model = made("resnet", depth=depth, width=64, size=size, classes=1000).model()
        seen = model(torch.empty(2, size, size, 3, dtype=torch.uint8))
    assert count(model) == parameters
    assert seen.shape == (2, 1000)


def test_a_resnet_of_another_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is 34: give one of 18, 50"):
        made("resnet", depth=34).model()


def test_images_come_from_the_folders_of_their_classes(tmp_path: Path) -> None:
    task = made("resnet", labels=["cat", "dog"])
    splits = task.data(str(tmp_path))
    assert splits.train.format == splits.held_out.format == "images"
    names = ["train/cat/1.jpg", "val/train/2.jpg", "test/dog/3.jpg", "train.jpg"]
    assert [splits.train.select(n) for n in names] == [True, False, False, False]
    assert [splits.held_out.select(n) for n in names] == [False, True, True, False]
    few = rows_of(made("resnet", made_up=4).data(None).train)
    told = task.preprocess(Rows({"image": few["image"], "label": ["dog"] * 4}))
    assert told["label"].tolist() == [1] * 4
    assert task.shape["outputs"] == 2


def test_images_come_from_parquet_files_where_labels_are_numbers(tmp_path: Path) -> None:
    splits = made("resnet").data(str(tmp_path))
    assert splits.train.format == "parquet"
    assert splits.train.select("cifar10-train-0.parquet")


def test_no_pixel_of_the_stripes_tells_their_class() -> None:
    task = made("resnet", made_up=2000)
    rows = task.preprocess(rows_of(task.data(None).train))
    assert np.bincount(rows["label"], minlength=10).min() > 150
    means = [rows["image"][rows["label"] == k].mean((0, 3)) for k in range(10)]
    assert np.ptp(np.stack(means), 0).max() < 40  # of 256, where the noise alone is 24
    columns = rows["image"].mean(-1).std(1).mean(1)  # along the image's height
    lying = rows["label"] % 2 == 0
    assert columns[lying].mean() > columns[~lying].mean() + 5


# --- bert ---


def test_bytes_are_tokens_cut_at_the_length() -> None:
    task = made("bert", length=4)
    tokens = task.tokens(["ab", "é", "abcdef", ""])
    assert tokens.tolist() == [[1, 99, 100, 0], [1, 197, 171, 0], [1, 99, 100, 101], [1, 0, 0, 0]]
    rows = Rows({"tokens": tokens[[1, 3]], "label": np.zeros(2, np.int64)})
    assert task.batch(rows, None)["tokens"].shape == (2, 3)  # without what is padding in all


def vocabulary(folder: Path, *more: str) -> str:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "able", ",", *more]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    return str(folder / "vocab.txt")


def test_words_are_the_longest_pieces_of_a_vocabulary(tmp_path: Path) -> None:
    task = made("bert", vocabulary=vocabulary(tmp_path, "##affab"), length=9)
    told = task.tokens(["Unaffable, Ünable", "unaffab xyz", "able " * 20])
    assert told.tolist() == [
        [2, 1, 8, 4, 6, 3, 0, 0, 0],  # "un ##affab" leaves "le", which is not known
        [2, 4, 9, 1, 3, 0, 0, 0, 0],
        [2, *[7] * 7, 3],
    ]
    assert task.model().words.num_embeddings == 10


def test_a_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the\nof\n")
    for file, why in (("a.txt", r"lacks \[UNK\]"), ("b.txt", "cannot be read")):
        with pytest.raises(DataError, match=why) as refused:
            made("bert", vocabulary=str(tmp_path / file))
        assert "vocab.txt" in refused.value.hint


def test_what_is_padding_changes_nothing() -> None:
    model = made("bert").model().eval()
    tokens = torch.from_numpy(rng().integers(1, 200, (3, 20)))
    tokens[1, 12:] = 0
    with torch.no_grad():
        both = model(tokens)
        assert torch.allclose(both[1], model(tokens[1:2, :12])[0], atol=1e-6)
        assert not torch.allclose(both[0], model(tokens[:1, :12])[0], atol=1e-5)


@pytest.mark.parametrize("old", [False, True])
def test_weights_are_those_of_the_file_but_for_a_head_of_other_outputs(
    old: bool, tmp_path: Path
) -> None:
    held = load_file(file := weights_file(tmp_path, old=old))
    name_in_file = module_of(task_of("bert")).name_in_file
    model = made("bert", weights=str(file), heads=2).model()
    assert model.head.weight.shape == (4, 32)
    for name, value in model.named_parameters():
        there = f"bert.{name_in_file(name)}"
        if old and "norm" in name:
            there = there.replace("weight", "gamma").replace("bias", "beta")
        assert name.startswith("head.") or torch.equal(value, held[there])
    same = made("bert", weights=str(file), heads=2, classes=7).model()
    assert torch.equal(same.head.weight, held["classifier.weight"])
    with torch.device("meta"):
        assert made("bert", weights=str(file)).model().pool.weight.is_meta


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("bert.embeddings.word_embeddings.weight"), "has no matrix 'embeddings.word_emb"),
        (
            without("bert.encoder.layer.1.output.dense.bias"),
            r"1.output.dense.bias \(32,\) none",
        ),
        (
            lambda tensors: tensors.update({"bert.embeddings.LayerNorm.bias": torch.zeros(3)}),
            r"LayerNorm.bias \(32,\) one of \(3,\)",
        ),
    ],
)
def test_weights_that_are_not_whole_are_refused(change: Any, why: str, tmp_path: Path) -> None:
    tensors = load_file(file := weights_file(tmp_path))
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(DataError, match=why):
        made("bert", weights=str(file)).model()


@pytest.mark.parametrize("content", [None, b"no weights"])
def test_weights_that_cannot_be_read_are_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"settings\.weights .* cannot be read"):
        made("bert", weights=str(file)).model()


def test_weights_that_are_too_small_for_what_is_asked_are_refused(tmp_path: Path) -> None:
    weights = str(weights_file(tmp_path, words=6))
    with pytest.raises(DataError, match=r"settings\.length is 65, and the weights know 64"):
        made("bert", weights=weights, length=65).model()
    with pytest.raises(DataError, match="vocabulary's length is 9, and the weights know 6"):
        made("bert", weights=weights, vocabulary=vocabulary(tmp_path)).model()


def test_tokens_and_logits_are_those_of_transformers() -> None:
    """Told by the library itself, of random weights and a small vocabulary; see `told.json`."""
    told = json.loads((GOLDEN / "told.json").read_text())
    task = made(
        "bert",
        weights=str(GOLDEN / "model.safetensors"),
        vocabulary=str(GOLDEN / "vocab.txt"),
        heads=2,
        classes=3,
        length=24,
    )
    tokens = task.tokens(told["texts"])
    assert tokens.tolist() == told["tokens"]
    with torch.no_grad():
        logits = task.model().eval()(torch.from_numpy(tokens).long())
    assert torch.allclose(logits, torch.tensor(told["logits"]), atol=1e-5)


def test_texts_are_split_by_the_names_of_files(tmp_path: Path) -> None:
    splits = made("bert").data(str(tmp_path))
    names = ["train.csv", "a/train-1.jsonl", "test.csv", "valid.parquet", "train/test.csv"]
    assert [splits.train.select(n) for n in names] == [True, True, False, False, False]
    assert [splits.held_out.select(n) for n in names] == [False, False, True, True, True]


def test_width_and_heads_must_fit() -> None:
    for name in ("bert", "gpt"):
        with pytest.raises(ValueError, match="width is 30, and no multiple of its 4 heads"):
            made(name, width=30, heads=4).model()


# --- multimodal ---


def test_neither_half_alone_tells_the_class() -> None:
    task = made("multimodal", made_up=400)
    rows = task.data(None).train.dataset
    assert set(rows["label"].to_pylist()) == set(range(16))
    batch = batch_of(task, 8)
    model = task.model().eval()
    with torch.no_grad():
        whole = model(batch["image"], batch["tokens"])
        other_images = model(batch["image"].flip(0), batch["tokens"])
        other_texts = model(batch["image"], batch["tokens"].flip(0))
    assert whole.shape == (8, 16)
    for other in (other_images, other_texts):
        assert not torch.allclose(whole, other)


def test_both_halves_come_from_parquet_files(tmp_path: Path) -> None:
    splits = made("multimodal", labels=["cat", "dog"]).data(str(tmp_path))
    for source in (splits.train, splits.held_out):
        assert source.format == "parquet"
        assert set(source.columns) == set(source.required) == {"image", "text", "label"}
    assert splits.train.types == {"text": "string", "label": "string"}
