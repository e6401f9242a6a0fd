"""What a terminal shows while a sweep goes on: a real one, and trials as they were recorded."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.cli.sweep import _followed
from raycloud.spec.sweep import Sweep
from raycloud.tuning.results import Measured, Results

SPACE: dict[str, Any] = {"global_batch": {"choice": [16, 32]}, "seed": {"range": [0, 9]}}
SWEEP = Sweep(space=SPACE, target=1.0, minimize=["seconds"], trials=3)
AT = Measured(step=10, measure=2.0, seconds=1.5, samples=320, bytes=4_200)
_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Terminal:
    """The other end of a pseudo-terminal, with what is on its screen.

    It knows what a table that is drawn anew is made of: lines, a cursor that goes up, and erasing.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._lines, self._row, self._column = [""], 0, 0

    def screen(self) -> list[str]:
        """What can be read now, to the last line with something in it."""
        text = b""
        os.set_blocking(self._end, False)
        try:
            while found := os.read(self._end, 65536):
                text += found
        except BlockingIOError:
            pass
        self._take(text.decode())
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n").split("\n")

    def _take(self, text: str) -> None:
        at = 0
        while at < len(text):
            if code := _CODE.match(text, at):
                at = code.end()
                self._obey(code[1], code[2])
                continue
            match text[at]:
                case "\n":
                    self._row += 1
                    self._lines += [""] * (self._row + 1 - len(self._lines))
                case "\r":
                    self._column = 0
                case letter:
                    line = self._lines[self._row].ljust(self._column)
                    after = line[self._column + 1 :]
                    self._lines[self._row] = line[: self._column] + letter + after
                    self._column += 1
            at += 1

    def _obey(self, number: str, what: str) -> None:
        match what:
            case "A":
                self._row -= int(number or 1)
                assert self._row >= 0
            case "K":
                self._lines[self._row] = ""
            case "m" | "h" | "l":  # colours, and whether there is a cursor
                pass
            case _:
                raise AssertionError(f"an unknown code {number}{what}")


@contextlib.contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal that standard error goes to."""
    ours, theirs = pty.openpty()
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield Terminal(ours)
    os.close(ours)


def recorded(results: Results) -> Iterator[tuple[int, Any]]:
    """What a sweep of three trials says, word by word: of which trial, and what."""
    for number in (0, 1):
        point = {"global_batch": 16 * (1 + number), "seed": number}
        yield number, results.add(number, point=point, status="running")
    yield 0, results.add(0, measured=AT)
    yield 1, results.add(1, measured=replace(AT, measure=1.75, seconds=2.5))
    yield 0, results.add(0, measured=replace(AT, step=20, measure=0.5, seconds=3.0))
    yield 0, results.add(0, status="reached")
    yield 2, results.add(2, point={"global_batch": 16, "seed": 7}, status="running")
    yield 1, results.add(1, status="failed", why="no \x1b[31mmemory")


HEAD = "trial  status   step  loss  seconds    sent  global_batch  seed"


def test_the_table_is_of_the_best_and_of_those_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results.open(tmp_path / "sweep.jsonl")
    seen = []
    with opened(monkeypatch) as terminal:
        with _followed(SWEEP) as show:
            for number, trial in recorded(results):
                show(results, trial)
                seen.append((number, terminal.screen()))
        left = terminal.screen()
    (_, first), *_, (_, over), (_, next_one), (_, last) = seen
    assert [line.split() for line in first[-1:]] == [["0", "running", "16", "0"]]
    running = seen[3][1]
    assert [line.split()[:4] for line in running[-3:]] == [
        HEAD.split()[:4],
        ["0", "running", "10", "2"],
        ["1", "running", "10", "1.75"],
    ]
    ended = "[1/3] trial 0 reached loss 0.5 global_batch=16 seed=0"
    assert over[0] == next_one[0] == last[0] == ended  # it stays, above the table
    assert [line.split()[:2] for line in next_one[2:]] == [
        ["0", "reached"],  # the best
        ["1", "running"],
        ["2", "running"],
    ]
    assert last[1].startswith("[2/3] trial 1 failed loss 1.75")
    assert last[1].endswith("memory")  # and it colours nothing
    assert [line.split()[:2] for line in last[3:]] == [["0", "reached"], ["2", "running"]]
    assert left == last[:2]  # the table goes with the sweep


def test_elsewhere_there_is_a_line_for_each_that_begins_or_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results.open(tmp_path / "sweep.jsonl")
    with _followed(SWEEP) as show:
        for _, trial in recorded(results):
            show(results, trial)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["0", "running"],
        ["1", "running"],
        ["0", "reached"],
        ["2", "running"],
        ["1", "failed"],
    ]
