"""The feeding benchmark, without running a contestant."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import ingest
from benchmarks.feeding import contestants, environment, epochs, images, mixing, sequence
from benchmarks.feeding.consumer import Sums, consume
from benchmarks.feeding.environment import NotInstalledError
from benchmarks.feeding.floors import Verdict
from benchmarks.feeding.images import ImageSet
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.machine import ROOT
from benchmarks.peers.torch_loader import KINDS, Shuffled, Table
from benchmarks.processes import CommandFailedError
from tests.feeding import row

ROWS = 24
CLICKS = ROOT.parent / "shared" / "data" / "clicks" / "online_shoppers_intention.csv"


def pixels(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    found = random.integers(0, 256, (rows, 8, 8, 3), dtype=np.uint8)
    return found, random.integers(0, 10, rows).astype(np.int8)


def sums(found: np.ndarray, labels: np.ndarray) -> Sums:
    return Sums().plus(found, labels)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    """Some generated images, found where the real ones are absent."""
    monkeypatch.setattr(images, "DEFAULT", tmp_path / "absent")
    monkeypatch.setattr(images, "QUICK_ROWS", ROWS)
    monkeypatch.setattr(images, "SMALL_ROWS", 12)
    return images.find(None, tmp_path, quick=True)


def setting(few: ImageSet, **changes: Any) -> Setting:
    made = Setting(
        images=few,
        clicks=None,
        environments=few.directory / "environments",
        repeats=2,
        quick=True,
        say=lambda _: None,
    )
    return replace(made, **changes)


def test_sums_are_of_the_rows_whatever_their_order_and_batches() -> None:
    found, labels = pixels()
    order = np.random.default_rng(1).permutation(ROWS)
    apart = Sums()
    for rows in np.array_split(order, 5):
        apart = apart.plus(found[rows], labels[rows])
    assert apart == sums(found, labels)
    assert (apart.rows, apart.labels) == (ROWS, int(labels.sum()))


def test_sums_tell_a_lost_a_doubled_a_changed_and_a_mislabelled_row() -> None:
    found, labels = pixels()
    whole = sums(found, labels)
    assert sums(found[1:], labels[1:]) != whole
    doubled = np.r_[1, 1 : len(found)]
    assert sums(found[doubled], labels[doubled]) != whole
    changed = found.copy()
    changed[3, 0, 0, 0] ^= 1
    assert sums(changed, labels) != whole
    swapped = labels.copy()
    first, second = np.flatnonzero(labels != labels[0])[0], 0
    swapped[[first, second]] = labels[[second, first]]
    assert sums(found, swapped).pixels == whole.pixels
    assert sums(found, swapped) != whole


def test_consume_takes_tensors_and_arrays_and_reads_all() -> None:
    found, labels = pixels()
    cut = [slice(0, 10), slice(10, 20), slice(20, ROWS)]
    arrays = consume(lambda: ((found[c], labels[c]) for c in cut), kind="warm", shuffled=True)
    tensors = consume(
        lambda: ((torch.from_numpy(found[c]), torch.from_numpy(labels[c])) for c in cut),
        kind="cold",
        shuffled=False,
    )
    assert arrays.sums == tensors.sums == sums(found, labels)
    assert (arrays.batches, arrays.kind, tensors.shuffled) == (3, "warm", False)
    assert 0 < arrays.first_s <= arrays.wall_s
    assert arrays.mean_ms <= arrays.p99_ms


def test_consume_refuses_what_is_not_decoded() -> None:
    found, labels = pixels()
    with pytest.raises(TypeError, match="float32"):
        consume(lambda: [(found.astype(np.float32), labels)], kind="cold", shuffled=True)


def test_images_are_generated_where_there_are_none(few: ImageSet) -> None:
    assert "generated" in few.kind
    assert (few.rows, few.decoded_bytes) == (ROWS, ROWS * 32 * 32 * 3)
    names = sorted(path.name for path in few.directory.iterdir())
    assert names == [*(["test-5.parquet"]), *(f"train-{n}.parquet" for n in range(5))]
    assert sum(pq.ParquetFile(p).metadata.num_rows for p in few.small.iterdir()) == 12
    assert "directory" not in few.record()


def test_images_of_a_directory_that_is_named(few: ImageSet, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    found = images.find(few.directory, tmp_path / "other", quick=False)
    assert (found.directory, found.sums) == (few.directory, few.sums)
    with pytest.raises(FileNotFoundError, match="--images"):
        images.find(tmp_path / "absent", tmp_path, quick=False)


def test_the_torch_contestant_delivers_every_image(few: ImageSet) -> None:
    both = Table(few.small), Table(few.directory)
    sampler = Shuffled(5)
    sampler.start, sampler.stop = both[0].rows, both[0].rows + both[1].rows
    assert len(sampler) == 5
    for name, kind in KINDS.items():
        data = kind(*both)
        apart = Sums()
        for indices in sampler:
            if name == "batched":
                found, labels = data.__getitems__(indices)
            else:
                items = [data[i] for i in indices]
                found = torch.stack([image for image, _ in items])
                labels = torch.stack([label for _, label in items])
            apart = apart.plus(found.numpy(), labels.numpy())
        assert apart == few.sums


def test_what_is_delivered_is_checked(few: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = asdict(few.sums)

    def run(command: list[str], place: Any, variables: Any) -> str:
        out = Path(command[command.index("--out") + 1])
        out.write_text(json.dumps({"epochs": [{"kind": "cold", "sums": delivered}]}))
        return ""

    monkeypatch.setattr(contestants, "started", run)
    found = contestants.deliver("raycloud", Path("python"), few, warm=1)
    assert found["epochs"][0]["kind"] == "cold"
    delivered["rows"] -= 1
    with pytest.raises(ValueError, match="raycloud: a cold epoch"):
        contestants.deliver("raycloud", Path("python"), few, warm=1)


def test_a_peer_that_cannot_be_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> Path:
        raise NotInstalledError("no wheel")

    monkeypatch.setattr(contestants, "streaming_python", refuse)
    found, missing = contestants.interpreters(tmp_path)
    assert {*contestants.FEEDERS} - {*found} == {one.name for one in missing}
    assert {one.why for one in missing} == {"not installed: no wheel"}
    assert "no wheel" in epochs.table([], missing)


def test_the_environment_says_why_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "REQUIREMENTS", (str(tmp_path / "absent.whl"),))
    with pytest.raises(NotInstalledError, match=r"absent\.whl"):
        environment.streaming_python(tmp_path / "environments")
    (place,) = (tmp_path / "environments").iterdir()
    assert not (place / "ready").exists()  # the next call tries again


@pytest.mark.parametrize("count", sequence.WORKERS)
def test_shares_are_uneven_and_add_up(count: int) -> None:
    job = sequence.job_of(1000)
    shares = sequence.shares_of(job, count)
    assert (len(shares), sum(shares)) == (count, job.micro_batches)
    assert min(shares) > 0


def test_the_order_is_the_same_for_any_workers(few: ImageSet) -> None:
    found = sequence.measure(setting(few))
    (verdict,) = found.verdicts
    assert verdict.passes
    assert found.record["each_row_once"]
    assert len(found.record["sha256"]) == 6


def test_another_order_is_noticed(few: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter("aaabaa")
    monkeypatch.setattr(sequence, "digest_of", lambda _: next(digests))
    (verdict,) = sequence.measure(setting(few)).verdicts
    assert verdict.value == 2.0
    assert not verdict.passes


def test_the_shuffle_is_measured_for_windows_and_for_none(few: ImageSet) -> None:
    many = replace(few, rows=3000, decoded_bytes=3000 * 3072)
    found = mixing.measure_shuffle(setting(many))
    assert found.record["found"][-1]["partitions"] == 0
    assert len(found.text.splitlines()) == 2 + len(mixing.LANES) * len(mixing.WINDOWS)


def test_without_clicks_that_is_said(few: ImageSet) -> None:
    assert "no clicks" in mixing.measure_strata(setting(few)).text


@pytest.mark.skipif(not CLICKS.exists(), reason="../shared/data is absent")
def test_stratified_partitions_have_the_mix(few: ImageSet) -> None:
    found = mixing.measure_strata(setting(few, clicks=CLICKS))
    (verdict,) = found.verdicts
    assert verdict.passes
    assert verdict.value > 0
    assert found.record["partitions"] > 1


def test_generated_images_are_those_of_a_table() -> None:
    made = images._generated(3)
    assert made.schema.names == ["image", "label"]
    assert made.schema.field("image").type == pa.binary()


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert ingest._parse(["--quick"]).repeats == 1
    assert "cifar" not in ingest._parse([]).only
    assert ingest._parse(["--only", "cifar,order"]).only == ("cifar", "order")
    for wrong in (["--only", "petastorm"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            ingest._parse(wrong)
    assert "petastorm" in capsys.readouterr().err


def test_a_failing_section_leaves_the_others(
    few: ImageSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Setting) -> Outcome:
        raise CommandFailedError("out of luck")

    def pass_(_: Setting) -> Outcome:
        verdict = Verdict(name="speed", value=2.0, at_least=1.0)
        return Outcome(record={"found": 1}, text="more", verdicts=[verdict])

    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(ingest, "find", lambda *_, **__: few)
    monkeypatch.setattr(ingest, "SECTIONS", {"memory": fail, "order": pass_, "short": short})
    file = tmp_path / "out.json"
    assert ingest.main(["--json", str(file), "--only", "memory,order"]) == 1
    record = json.loads(file.read_text())
    assert record["failures"] == {"memory": "out of luck"}
    assert record["sections"] == {"order": {"found": 1}}
    assert record["verdicts"][0]["passes"]
    assert record["images"]["rows"] == ROWS
    assert {"cpu", "commit", "ray"} <= record["machine"].keys()
    assert "out of luck" in capsys.readouterr().err
    assert ingest.main(["--only", "order"]) == 0
    assert ingest.main(["--only", "short"]) == 1


def short(_: Setting) -> Outcome:
    return Outcome(record={}, text="", verdicts=[Verdict(name="x", value=0.5, at_least=1.0)])


def test_a_peer_that_fails_is_named_and_ours_is_not_forgiven(
    few: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("raycloud", "torch loader, own decoder")
    failing = {names[1]}

    def deliver(name: str, *_: Any, **__: Any) -> dict[str, Any]:
        if name in failing:
            raise CommandFailedError("out of luck")
        return row(name, 0, ("cold", True, 1.0), ("warm", True, 1.0))

    monkeypatch.setattr(epochs, "deliver", deliver)
    monkeypatch.setattr(epochs, "interpreters", lambda _: (dict.fromkeys(names, Path("p")), []))
    found = epochs.measure(setting(few))
    assert [one["name"] for one in found.record["missing"]] == [names[1]] * 2
    assert "out of luck" in found.text
    failing.add("raycloud")
    with pytest.raises(CommandFailedError):
        epochs.measure(setting(few))
