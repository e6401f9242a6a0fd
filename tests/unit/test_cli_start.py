"""The command line before a command runs: help, light imports, and when output is plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud import __version__, cli
from raycloud.cli import shell


class Stream:
    def __init__(self, *, tty: bool) -> None:
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(
    ("tty", "plain", "variables", "expected"),
    [
        (True, False, {}, False),
        (True, True, {}, True),
        (False, False, {}, True),
        (True, False, {"NO_COLOR": "1"}, True),
        (True, False, {"NO_COLOR": ""}, False),
        (True, False, {"TERM": "dumb"}, True),
    ],
)
def test_when_output_is_plain(
    monkeypatch: pytest.MonkeyPatch,
    tty: bool,
    plain: bool,
    variables: dict[str, str],
    expected: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert shell.is_plain(Stream(tty=tty), plain=plain) is expected  # type: ignore[arg-type]


def test_version_and_help() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"raycloud {__version__}\n"
    for args in (["--help"], ["train", "--help"], ["plan", "--help"], ["report", "--help"]):
        result = CliRunner().invoke(cli.app, args)
        assert result.exit_code == 0
        assert "Exit codes" in result.stdout
    assert "Did you mean" in CliRunner().invoke(cli.app, ["trian"]).stderr


def test_the_start_is_light() -> None:
    heavy = ("torch", "ray", "pyarrow", "numpy", "pydantic", "rich", "tensorboard", "fsspec")
    code = f"import sys, raycloud.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_main_starts_its_clock_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(cli, "app", lambda *, obj: seen.append(obj))
    cli.main()
    assert isinstance(seen[0], float)


def test_report_of_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot read the event log")
