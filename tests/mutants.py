"""Do the tests catch bugs? `python -m tests.mutants` plants some, one at a time, and runs them.

What is needed of the repository is copied aside, a bug is planted in the copy, and the tests of the
fast tier that know its room run there until the first one fails. Prints a table; the exit code is 0
if at most one of the bugs was not caught.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
NEEDED = ("raycloud", "tests", "docs", "pyproject.toml")
_ORDER = ("tests/unit/test_order_*.py",)
_CONTROL = ("tests/unit/test_control_*.py",)
_SEARCHED = (
    "tests/property/test_order_*property.py",
    "tests/property/test_control_*.py",
)
# The tests that know a room, what is quick first. A mutant of a room that is not here, or whose
# tests take long, names its own: `Mutant.tests`.
KNOW: dict[str, tuple[str, ...]] = {
    "order": (*_ORDER, *_CONTROL, *_SEARCHED),
    "control": (*_CONTROL, *_ORDER, *_SEARCHED),
    "checkpoint": ("tests/unit/test_checkpoint_*.py",),
    "data": ("tests/unit/test_data_*.py", "tests/property/test_data_*.py"),
    "on_ray": ("tests/unit/test_on_ray_*.py",),
    "planner": ("tests/unit/test_planner_*.py", "tests/property/test_planner_*.py"),
    "report": ("tests/unit/test_report_*.py",),
    "step": ("tests/unit/test_step_*.py", "tests/property/test_exactness*.py"),
    "net": ("tests/unit/test_net_*.py",),
    "recovery": ("tests/unit/test_recovery_*.py", "tests/property/test_exactness*.py"),
    "sync": ("tests/unit/test_sync_*.py", "tests/property/test_sync_property.py"),
    "worker": ("tests/unit/test_worker_*.py", "tests/property/test_exactness*.py"),
}
MAY_LIVE = 1
_LIMIT_S = 300.0
_CORES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a mutant: the test that failed, empty if none did."""

    mutant: Mutant
    caught_by: str
    seconds: float


def planted(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file, with the bug in it.

    Raises:
        ValueError: The old text does not stand there exactly once, or the new one is no Python.
    """
    path = root / "raycloud" / mutant.file
    text = path.read_text(encoding="utf-8")
    times = text.count(mutant.old)
    if times != 1:
        raise ValueError(f"{mutant.file} has the old text {times} times, not once: {mutant.old!r}")
    changed = text.replace(mutant.old, mutant.new)
    ast.parse(changed, str(path))
    return changed


def known(mutant: Mutant | None, root: Path = ROOT) -> list[Path]:
    """The files of the tests that are to catch a mutant, or of all that are to catch one."""
    asked = MUTANTS if mutant is None else (mutant,)
    patterns = [pattern for one in asked for pattern in one.tests or KNOW[one.room]]
    return list(dict.fromkeys(f for p in patterns for f in sorted(root.glob(p))))


def main() -> int:
    """Plant every mutant; 0 if the tests catch enough of them."""
    for mutant in MUTANTS:
        planted(mutant)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_CORES) as cores:
        sound = _tested(Path(folder) / "sound", None)
        if sound:
            _say(f"the tests fail without any bug: {sound}")
            return 1
        outcomes = []
        for found in cores.map(
            lambda pair: _outcome(Path(folder) / str(pair[0]), pair[1]), enumerate(MUTANTS, start=1)
        ):
            outcomes.append(found)
            _say(_row(len(outcomes), found))
    return _verdict(outcomes, time.monotonic() - began_s)


def _verdict(outcomes: Iterable[Outcome], seconds: float) -> int:
    outcomes = list(outcomes)
    alive = [found.mutant for found in outcomes if not found.caught_by]
    caught = len(outcomes) - len(alive)
    _say(f"\n{caught} of {len(outcomes)} caught, in {seconds:.0f} s")
    for mutant in alive:
        _say(f"not caught: {mutant.file}: {mutant.breaks}")
    return 0 if len(alive) <= MAY_LIVE else 1


def _outcome(copy: Path, mutant: Mutant) -> Outcome:
    began_s = time.monotonic()
    caught_by = _tested(copy, mutant)
    shutil.rmtree(copy)
    return Outcome(mutant=mutant, caught_by=caught_by, seconds=time.monotonic() - began_s)


def _tested(copy: Path, mutant: Mutant | None) -> str:
    """The test that failed in a copy with this mutant; empty if all passed."""
    copy.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, copy / name)
    if mutant is not None:
        (copy / "raycloud" / mutant.file).write_text(planted(mutant), encoding="utf-8")
    files = [str(file.relative_to(copy)) for file in known(mutant, copy)]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not full"]
    limit_s = _LIMIT_S
    if mutant is None:  # all tests of all mutants, and nothing beside them
        options += ["--numprocesses", str(_CORES), "--dist", "worksteal"]
        limit_s *= 3
    command = [sys.executable, "-m", "pytest", *options, *files]
    settings = {"CI": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    settings["RAYCLOUD_TESTS"] = ""  # the fast tier's examples, whoever asks
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"they do not end within {limit_s:g} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else (done.stderr or done.stdout)[-200:]


def _row(number: int, found: Outcome) -> str:
    verdict = "caught" if found.caught_by else "NOT CAUGHT"
    by = found.caught_by.partition(" ")[2].rpartition("/")[2] or found.caught_by
    where = f"{number:>2}  {verdict:<10}  {found.seconds:>5.1f} s  {found.mutant.file:<24}"
    return f"{where}  {found.mutant.breaks}" + (f"\n{'':>50}{by}" if by else "")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
