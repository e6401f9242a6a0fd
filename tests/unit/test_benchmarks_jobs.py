"""`benchmarks.jobs` without a run: its data, its numbers, and its table in the pages."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.jobs import CASES, PASSAGE, SEEDS, compared, passages, table, texts
from benchmarks.machine import ROOT
from raycloud import load_job
from tests.jobs import JOBS

RESULTS = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("jobs", "jobs_gpu")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two short texts; the third one comes with Python."""
    (tmp_path / "text").mkdir()
    for name, word in (("tinyshakespeare", "thou "), ("wikitext-2-valid", "river\n")):
        (tmp_path / f"text/{name}.txt").write_text(word * 1000)
    return tmp_path


def test_passages_are_of_three_texts_and_held_out_apart(source: Path) -> None:
    found = passages(source)
    for split in found.values():
        assert {number for _, number in split} == {0, 1, 2}
        assert {len(text) for text, _ in split} == {PASSAGE}
    manual = [{text for text, number in found[split] if number == 2} for split in found]
    assert len(manual[0] & manual[1]) < 0.05 * len(manual[1])  # what the manual says twice
    assert passages(source) == found


def test_texts_are_written_as_the_job_reads_them(source: Path) -> None:
    folder = texts(source, source / "data")
    read = {file.stem: pq.read_table(file) for file in folder.iterdir()}
    assert set(read) == {"train", "test"}
    assert all(one.column_names == ["text", "label"] for one in read.values())
    assert len(read["test"]) == min(2000, len(passages(source)["test"]))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_case_is_a_job_that_loads(case: object) -> None:
    overrides = [f"{name}={value}" for name, value in case.settings.items()]
    job = load_job(JOBS / f"{case.job}.yaml", overrides=overrides)
    assert job.steps
    assert job.epochs is None


def test_a_difference_is_noise_where_its_interval_holds_zero() -> None:
    """Variances of 1 and 1 over 3 runs each: a half of t(0.975, 4) * sqrt(2 / 3)."""
    found = compared([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert found["difference"] == -1.0
    assert found["interval95_half"] == pytest.approx(2.776445 * (2 / 3) ** 0.5)
    assert found["within_noise"]
    assert not compared([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])["within_noise"]


def test_the_page_has_the_table_of_the_results() -> None:
    each = [json.loads(file.read_text())["cases"] for file in RESULTS]
    assert [{CASES[name].gpu for name in cases} for cases in each] == [{False}, {True}]
    cases = each[0] | each[1]
    assert [*cases] == [name for name in CASES if name in cases]
    assert all(one["seeds"] == list(SEEDS) for one in cases.values())
    _, _, below = (ROOT / "docs/jobs.md").read_text().partition("<!-- measured -->\n")
    assert below.splitlines() == table(cases)
