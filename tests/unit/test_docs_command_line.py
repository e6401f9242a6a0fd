"""What docs/command-line.md says of exit codes, resuming and templates is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from raycloud.cli import shell
from raycloud.cli.shell import EXIT_CODES
from raycloud.project.templates import TEMPLATES, files_of
from raycloud.spec import rundir

PAGE = (Path(__file__).parents[2] / "docs/command-line.md").read_text()


def table(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its rule."""
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if len(row) > 2]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_exit_codes() -> None:
    codes = {int(row[0]) for row in table(section("Exit codes")) if row[0].isdigit()}
    assert codes == {0, shell.JOB, shell.MACHINE, shell.OURS, shell.STOPPED}
    assert codes == {int(code) for code in re.findall(r"(?:: |; )(\d+) ", EXIT_CODES)}


def test_resuming() -> None:
    rows = table(section("Going on with a run"))
    assert rows == table(rundir.__doc__ or "")
    assert [row[0] for row in rows[-3:]] == ["never", "allow", "must"]


def test_templates_and_their_files() -> None:
    said = set(re.findall(r"`([^`\s]+)`", section("A new project")))
    assert set(TEMPLATES) < said
    assert set(files_of("text", "a")) < said
