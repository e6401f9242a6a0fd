"""Runs side by side: what differs in their jobs, what came of them, and how that is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.errors import RunDirectoryError
from raycloud.events import RunStarted
from raycloud.report.comparison import (
    Comparison,
    compare,
    comparison_lines,
    differences,
    earlier,
)
from raycloud.report.state import Tally
from raycloud.report.summary import of_run, rate_curve
from raycloud.report.summary_text import summary_text
from tests.logs import STARTED_T, commit, entries, run_directory, tally_of

WIDE = 100


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = run_directory(tmp_path / "gpt-1", "steps: 10\nsettings: {width: 4}\n", entries())
    shorter = entries(steps=5, loss=1.0, status="stopped")
    second = run_directory(
        tmp_path / "gpt-2",
        "steps: 20\nsettings: {width: 4, depth: 2}\nelastic: {shares: equal}\n",
        shorter,
    )
    return [first, second]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def compared_text(comparison: Comparison, *, width: int) -> str:
    return "\n".join(text for _, text in comparison_lines(comparison, width=width))


def rows(text: str) -> dict[str, list[str]]:
    """Cells by label; cells are two blanks or more apart."""
    cells = [
        [cell.strip() for cell in line.strip().split("   ") if cell] for line in text.split("\n")
    ]
    return {row[0]: row[1:] for row in cells if row}


def test_only_what_differs_is_told(runs: list[Path]) -> None:
    comparison = compare(runs)
    assert comparison.differs == {
        "settings.depth": comparison.differs["settings.depth"],
        "steps": (10, 20),
        "elastic.shares": ("auto", "equal"),
    }
    assert [str(value) for value in comparison.differs["settings.depth"]] == ["-", "2"]


def test_values_of_other_types_differ() -> None:
    assert differences([{"a": 1}, {"a": True}]) == {"a": (1, True)}
    assert differences([{"a": 1}, {"a": 1}]) == {}


def test_a_task_that_was_moved_is_the_same_task(tmp_path: Path) -> None:
    moved = [tmp_path / "a", tmp_path / "b"]
    for path in moved:
        run_directory(path, "steps: 3\n", entries())
        job = (path / "job.yaml").read_text().replace("raycloud.metrics:Mean", f"{path}/x.py:Task")
        (path / "job.yaml").write_text(job)
    assert compare(moved).differs == {}


def test_what_came_of_them(runs: list[Path]) -> None:
    told = rows(compared_text(compare(runs), width=WIDE))
    assert told["status"] == ["finished", "stopped"]
    assert told["steps"] == ["10", "5"]  # the outcome stands below the job's field
    assert told["held out loss"] == ["2.1", "1.1 -47.6%"]
    assert told["samples per second"] == ["8", "8"]
    assert told["last checkpoint"] == ["10", "5"]
    assert "cost" not in told  # no node had a price


def test_curves_have_one_scale(runs: list[Path]) -> None:
    first, second = rows(compared_text(compare(runs), width=WIDE))["loss curve"]
    assert first[0] == "█"  # the largest loss of both
    assert second[0] == "▅"  # it began at 3: (3 - 1.4) / (4 - 1.4) of seven bars is 4.3
    assert second[-1] == "▁"


def test_runs_that_do_not_fit_stand_below(runs: list[Path]) -> None:
    wide = compared_text(compare(runs), width=WIDE)
    narrow = compared_text(compare(runs), width=40)
    assert wide.count("what came of them") == 1
    assert narrow.count("what came of them") == 2
    assert narrow.split("\n")[0].strip() == "gpt-1"
    assert max(map(len, narrow.split("\n"))) <= 50


def test_the_same_job_twice(runs: list[Path]) -> None:
    text = compared_text(compare([runs[0], runs[0]]), width=WIDE)
    assert "the jobs are the same" in text
    assert "%" not in rows(text)["loss"][1]


def test_titles_are_bold_in_a_terminal(runs: list[Path]) -> None:
    comparison = compare(runs)
    assert ("bold", "what came of them") in comparison_lines(comparison, width=WIDE)


def test_the_command(runs: list[Path]) -> None:
    code, out, _ = call("compare", *runs)
    assert code == 0
    assert out.split("\n")[0].split() == ["gpt-1", "gpt-2"]
    assert "\x1b" not in out
    code, out, _ = call("compare", *runs, "--json")
    record = json.loads(out)
    assert (record["format"], [run["outcomes"]["steps"] for run in record["runs"]]) == (2, [10, 5])
    assert record["differs"]["steps"] == [10, 20]
    assert record["differs"]["settings.depth"] == [None, 2]
    assert record["runs"][1]["outcomes"]["shares"] == [1, 1]


def test_no_secret_of_a_job_is_shown(runs: list[Path]) -> None:
    job = runs[1] / "job.yaml"
    job.write_text(job.read_text() + "data: {path: 's3://me:hunter2@host/x'}\n")
    for arguments in ((), ("--json",)):
        code, out, _ = call("compare", *runs, *arguments)
        assert code == 0
        assert "data.path" in out
        assert "hunter2" not in out


def test_what_cannot_be_compared(runs: list[Path], tmp_path: Path) -> None:
    assert call("compare", runs[0])[0] == 2
    code, _, err = call("compare", runs[0], tmp_path / "missing")
    assert code == 2
    assert "holds no run" in err
    assert "hint: " in err
    (runs[1] / "events.jsonl").write_text("{}\n\n")
    with pytest.raises(RunDirectoryError, match="line 1 cannot be read"):
        compare(runs)


def test_the_run_before(runs: list[Path], tmp_path: Path) -> None:
    assert earlier(runs[1]) == runs[0]
    assert earlier(runs[0]) is None
    assert earlier(tmp_path / "gpt-7") == runs[1]
    assert earlier(tmp_path / "gpt") is None
    assert earlier(tmp_path / "gpt-²") is None


def test_the_end_of_a_run_names_what_comes_next(runs: list[Path]) -> None:
    lines = summary_text(of_run(runs[1]), runs[1]).split("next\n")[1].split("\n")
    assert [line.split()[:2] for line in lines] == [
        ["raycloud", "train"],
        ["raycloud", "report"],
        ["raycloud", "compare"],
        ["tensorboard", "--logdir"],
    ]
    assert lines[2].split()[2:] == [str(runs[0]), str(runs[1])]
    going = run_directory(runs[0].parent / "x", "steps: 9\n", entries(status=""))
    assert f"raycloud watch {going}" in summary_text(of_run(going), going)


def test_the_rate_has_a_curve(runs: list[Path]) -> None:
    summary = of_run(runs[0])
    assert summary.rate_curve == [[step, 8.0] for step in range(2, 11)]
    assert "▇▇▇" not in summary_text(summary).split("samples/s")[0]
    assert "█████████ 8 samples/s" in summary_text(summary)  # from zero: steady is full


def test_a_pause_is_not_a_slow_stretch() -> None:
    told = entries(status="")
    resumed = RunStarted(job="gpt", version="0.1.0", resumed_from_step=10)
    later = [(STARTED_T + 900 + n, commit(0, 10 + n, 11 + n)) for n in range(3)]
    tally = tally_of(*told, (STARTED_T + 800, resumed), *later)
    curve = rate_curve(tally, 100)
    assert [rate for _, rate in curve] == [8.0] * 9 + [None] + [8.0] * 2
    assert rate_curve(tally, 2) == [[7, 8.0], [13, 8.0]]
    assert rate_curve(Tally(), 5) == []
