"""An error on the command line fits one screen: the cause, then a hint; the rest behind --debug."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.cli.shell import MACHINE, error_text
from raycloud.errors import InternalError, JobError, TaskError
from raycloud.report.notes import MOST_LINES
from raycloud.worker import member

SCREEN = 24


def said(error: BaseException, *, debug: bool = False) -> str:
    try:
        raise error
    except type(error) as raised:
        return error_text(raised, debug=debug, plain=True)[0]


def sent_by_a_member(depth: int) -> str:
    """What a member reports of a task whose loss raises, deep below the code of a package."""
    code = "def loss(n):\n    if n:\n        return loss(n - 1)\n    raise ValueError('no width')\n"
    names: dict[str, object] = {}
    exec(compile(code, "/w/task.py", "exec"), names)
    try:
        names["loss"](depth)  # type: ignore[operator]
    except ValueError as cause:
        error = TaskError("Task.loss raised ValueError: no width")
        error.__cause__ = cause
        return error.message + member._cause(error)
    raise AssertionError


def test_a_tracebacks_place_stands_for_it() -> None:
    message = sent_by_a_member(60)
    assert len(message.splitlines()) > 5
    assert said(TaskError(message)) == (
        "error: Task.loss raised ValueError: no width\n  at /w/task.py:4 in loss"
    )


def test_the_place_is_in_the_users_code_where_there_is_any() -> None:
    package = Path(error_text.__code__.co_filename).parent
    frames = [
        ("/w/model.py", 7, "forward", "y = torch.cat(x)"),
        ("/opt/lib/python3.11/site-packages/torch/cat.py", 99, "cat", "fail()"),
        (f"{package}/x.py", 1, "inner", "pass"),
    ]
    text = "".join(f'  File "{f}", line {n}, in {w}\n    {c}\n' for f, n, w, c in frames)
    message = f"Task.loss raised E: x\nTraceback (most recent call last):\n{text}E: x"
    assert said(TaskError(message)).endswith("\n  at /w/model.py:7 in forward: y = torch.cat(x)")
    assert said(TaskError(message.replace("/w/", f"{package}/"))).endswith("/x.py:1 in inner: pass")


def test_a_fault_of_ours_keeps_its_last_line() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/a/b.py", line 2, in f\n    g()\nOSError: no'
    )
    text = said(InternalError(f"member 1: {trace}"))
    assert text.startswith("error: member 1: OSError: no\n  at /a/b.py:2 in f: g()\n\nhint: ")


@pytest.mark.parametrize(
    ("error", "says", "hint"),
    [
        (
            PermissionError(13, "Permission denied", "/data/x"),
            "/data/x: Permission denied",
            "there",
        ),
        (OSError(28, "No space left on device", b"/tmp/a"), "/tmp/a: No space left", "free space"),
        (OSError(28, "No space left on device"), "refused: No space left on device", "--debug"),
        (TimeoutError("timed out"), "refused: timed out", "--debug"),
        (ConnectionResetError(), "refused: ConnectionResetError", "--debug"),
    ],
)
def test_what_the_system_refuses_is_the_machines(error: OSError, says: str, hint: str) -> None:
    text, code = error_text(error, debug=False, plain=True)
    assert code == MACHINE
    assert says in text
    assert hint in text
    assert "fault in raycloud" not in text


def test_debug_shows_all_of_it() -> None:
    message = sent_by_a_member(60)
    text = said(TaskError(message, hint="mend it"), debug=True)
    assert message in text
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("\n\nhint: mend it")


@pytest.mark.parametrize("lines", [MOST_LINES, MOST_LINES + 1, 500])
def test_many_lines_are_cut_to_a_screen(lines: int) -> None:
    message = "\n".join(f"mistake {n}" for n in range(lines))
    text = said(JobError(message, hint="write it anew"))
    assert len(text.splitlines()) <= SCREEN
    assert ("more lines: --debug shows them" in text) == (lines > MOST_LINES)
    if lines > MOST_LINES:
        assert f"… and {lines - MOST_LINES + 1} more lines" in text
    assert text.endswith("hint: write it anew")


def test_a_line_without_end_is_cut() -> None:
    assert len(said(JobError("x" * 100_000))) < 700
