"""Every command and code block of the README and the quick start is executed, in order, as written.

A block whose first line names a file is that file; commands run in one folder per page. What is
executed by another test, which needs a cluster or an installation of its own or has a command for
its subject, is listed below with that test. Transcripts are held by tests/unit/test_readme.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from raycloud.on_ray.tasks import resolve
from raycloud.spec import load_job
from tests.live import RAYCLOUD, ROOT, command, exact_steps
from tests.pages import DOCS, README, Block, blocks, table

QUICK = DOCS / "quickstart.md"
RUNS = {README: {"line"}, QUICK: {"first", "wide", "python"}}
PATIENCE_S = 240.0

# Commands that are not executed here, and the test that does it.
ELSEWHERE = {
    "pip install": "tests/ray/test_installed.py",
    "raycloud submit": "tests/ray/head/test_submit.py",
    "raycloud status": "tests/ray/head/test_standing.py",
    "raycloud logs": "tests/ray/head/test_standing.py",
    "raycloud stop": "tests/ray/head/test_standing.py",
    "raycloud chaos": "tests/ray/test_chaos.py",
    "raycloud config": "tests/unit/test_cli_config.py",
    "raycloud plan": "tests/ray/test_plan.py",
    "raycloud report": "tests/ray/test_cli_real.py",
    "raycloud train first/job.yaml --try": "tests/ray/test_try.py",
    "raycloud doctor": "tests/ray/test_doctor.py",
    "raycloud watch": "tests/unit/test_report_watch.py",
}
EXECUTED = ("raycloud ", "python ", "make ", "cd ", *ELSEWHERE)
TREE = "raycloud/\n"  # the drawing of the house: tests/unit/test_house.py holds it

pytestmark = [pytest.mark.timeout(900)]


def is_commands(block: Block) -> bool:
    return block.language in {"", "sh", "bash", "console"} and not block.text.startswith(TREE)


def elsewhere(line: str) -> str | None:
    return next((test for start, test in ELSEWHERE.items() if line.startswith(start)), None)


@pytest.mark.parametrize("page", [README, QUICK], ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_executed(page: Path) -> None:
    for block in blocks(page):
        if is_commands(block):
            assert block.commands
            strange = [line for line in block.commands if not line.startswith(EXECUTED)]
            assert not strange, f"{page.name}: nothing here executes {strange}"
        elif not block.text.startswith(TREE) and not block.is_transcript:
            assert block.language in {"python", "yaml", "diff"}, (
                f"{page.name}: {block.language} block"
            )
            assert block.language == "python" or block.files, f"{page.name}: a file without a name"


def test_what_is_executed_elsewhere_is() -> None:
    lines = [line for page in (README, QUICK) for b in blocks(page) for line in b.commands]
    for test in {elsewhere(line) for line in lines} - {None}:
        assert (ROOT / str(test)).is_file(), test
    for start, test in ELSEWHERE.items():
        word = re.escape(start.rpartition(" ")[2])
        assert re.search(rf"(?<!\w){word}\b", (ROOT / test).read_text()), f"{test} runs no {start}"


@pytest.fixture
def environment(cluster: str) -> dict[str, str]:
    """A reader's, with a Ray that runs already, so that not each command has to start one."""
    return {
        "RAY_ADDRESS": cluster,
        "RAY_AUTH_MODE": "token",
        "PATH": f"{RAYCLOUD.parent}:{os.environ['PATH']}",
    }


CPUS = 4


@pytest.mark.full(only="the blocks of README and quick start do what they say")
@pytest.mark.parametrize("page", [README, QUICK], ids=lambda page: page.name)
def test_the_blocks_do_what_they_say(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In order, in one folder; each command ends with 0."""
    executed, folder = 0, tmp_path / "work"
    folder.mkdir()
    for block in blocks(page):
        if block.files:
            for name, text in block.files.items():
                (folder / name).write_text(text)
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), {"__name__": "a_block"})
        elif is_commands(block):
            for line in block.commands:
                if elsewhere(line) is None and not line.startswith("make "):
                    _run(line, folder, tmp_path / f"out-{executed}", environment)
                    executed += 1
    assert executed >= 3
    _check(page, folder, tmp_path)
    if page == QUICK:
        _read_as_the_questions_say(folder)


def _read_as_the_questions_say(folder: Path) -> None:
    """The model, out of the quick start's first run."""
    (block,) = [b for b in blocks(DOCS / "faq.md") if "load_tensors" in b.text]
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(compile(block.text, "faq.md", "exec"), names)
    kept = load_job(folder / "first/job.yaml")
    resolve(kept)(**kept.settings).model().load_state_dict(names["state"], strict=True)


def _run(line: str, folder: Path, out: Path, environment: dict[str, str]) -> None:
    with command(out, "bash", "-ec", f"cd {folder}; {line}", **environment) as one:
        assert one.code(PATIENCE_S) == 0, f"{line}\n{one.out}\n{one.err}"


def _check(page: Path, folder: Path, tmp_path: Path) -> None:
    """What the pages say of what is there afterwards."""
    runs = sorted(log.parent for log in folder.glob("runs/**/events.jsonl"))
    assert {run.name for run in runs} == RUNS[page]
    told = {row[0].strip("`/") for row in table(DOCS / "operations.md", "What a run leaves")}
    for run in runs:
        assert exact_steps(run) > 0
        assert {path.name for path in run.iterdir()} <= told
    if page == QUICK:
        assert exact_steps(folder / "runs/wide") == 200
        outputs = [path.read_text() for path in sorted(tmp_path.glob("out-*/out"))]
        assert any(re.search(r"^finished 0\.\d", out, re.MULTILINE) for out in outputs)


# --- make ---


@pytest.fixture
def made(ray_tmpdir: Path) -> tuple[str, ...]:
    """`make`, with the environment that runs these tests taken for ready."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return (
        "make",
        "-C",
        str(ROOT),
        f"VENV={sys.prefix}",
        "-o",
        f"{sys.prefix}/.ready",
        "-o",
        "setup",
    )


def test_make_train(made: tuple[str, ...], tmp_path: Path) -> None:
    """Said, not done: tests/ray/test_cli_real.py does it, in few steps."""
    with command(tmp_path, *made, "-n", "train", "ARGS=--set steps=2") as one:
        assert one.code() == 0, one.err
    assert f"{sys.prefix}/bin/raycloud train jobs/gpt.yaml --set steps=2\n" in one.out


@pytest.mark.parametrize(("tier", "full"), [("test", False), ("test-all", True)])
def test_make_test_is_every_check_and_the_tests_of_its_tier(
    made: tuple[str, ...], tmp_path: Path, tier: str, full: bool
) -> None:
    """Said, not done: these tests are what it would run."""
    with command(tmp_path, *made, "-n", tier) as one:
        assert one.code() == 0, one.err
    for part in (
        "ruff check",
        "mypy",
        "lint-imports",
        "generate.py --check",
        "sphinx",
        ".ci/audit",
    ):
        assert part in one.out
    marked = re.findall(r"pytest .*-m '(.*)'", one.out)
    kinds = [mark.removesuffix(" and (full or not full)") for mark in marked]
    if not full:
        kinds = [mark.removesuffix(" and (not full)") for mark in marked]
    assert kinds == ["not ray and not testbed", "not alone", "alone"]
    calls = re.findall(r"-m pytest (.*) -m", one.out)
    both = ["tests/ray", "tests/testbed"]
    below = [[word for word in call.split() if word.startswith("tests")] for call in calls]
    assert below == [[], both, both]


def test_every_job_of_the_readme_can_be_loaded() -> None:
    named = re.findall(r"\bjobs/\w+\.yaml", README.read_text())
    assert named
    for name in named:
        job = load_job(ROOT / name)
        assert resolve(job)(**job.settings)
