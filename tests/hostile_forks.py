"""Opens hostile files, each in a process of its own that has little memory and is watched.

`python -m tests.hostile_forks` imports raycloud once, then forks for each case it is asked for: so
what is measured is the opening, not the imports. It reads `[module, case, folder]` in JSON from
each line of its input and answers with an `Outcome` in JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
MOST_BYTES = 200 * 10**6
MOST_S = 1.0
_HANGS_S = 20.0
CORPORA = ("checkpoints", "data", "images", "jobs", "packages", "runs")
# Arrow's own allocators reserve far more than they use; one that does not can be held to a limit.
_SETTINGS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
# What would mean that a file was believed: that it made a process, a connection, or an object.
_NEVER = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pickle.find_class",
    "socket.connect",
    "subprocess.Popen",
    "ctypes.dlopen",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A hostile file.

    Attributes:
        make: Writes it into an empty folder.
        open: What raycloud does with it, given the folder.
        error: The class it is refused with.
        says: What the message has to name.
    """

    make: Callable[[Path], None]
    open: Callable[[Path], Any]
    error: type[Exception]
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of opening it.

    Attributes:
        error: Names of the classes of what was raised, the most special first; empty: nothing was.
        text: The whole error, as a person gets it.
        seconds: How long it took.
        peak_bytes: Memory in use at the worst moment, more than before.
        did: What no file may bring a process to do.
    """

    error: list[str] = field(default_factory=list)
    text: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    did: list[str] = field(default_factory=list)


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        """Start it; it answers once it has imported what it needs."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile_forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_SETTINGS},
        )

    def open(self, corpus: str, case: str, folder: Path) -> Outcome:
        """What comes of a case whose file lies in the folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([corpus, case, str(folder)]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        """It."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.communicate()


def corpus(name: str) -> dict[str, Case]:
    """The cases of a corpus, by name."""
    cases: dict[str, Case] = importlib.import_module(f"tests.hostile.{name}").CASES
    return cases


def _main() -> None:
    corpora = {name: corpus(name) for name in (*CORPORA, "watch")}
    for line in sys.stdin:
        name, case, folder = json.loads(line)
        answer = json.dumps(asdict(_forked(corpora[name][case], Path(folder))))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _forked(case: Case, folder: Path) -> Outcome:
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        code = 1
        try:
            os.write(into, json.dumps(asdict(_watched(case, folder))).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Outcome(error=["Died"], text=f"status {os.waitstatus_to_exitcode(status)}")
    return Outcome(**json.loads(text))


def _watched(case: Case, folder: Path) -> Outcome:
    os.chdir(folder)
    signal.setitimer(signal.ITIMER_REAL, _HANGS_S)  # nobody takes the signal: it ends the process
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    limit = _status("VmData") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    did: list[str] = []
    sys.addaudithook(lambda event, given: _watch(event, given, folder, did))
    error: BaseException | None = None
    started = time.monotonic()
    try:
        case.open(folder)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is what is asked for
        error = raised
    seconds = time.monotonic() - started
    return Outcome(
        error=[] if error is None else [kind.__name__ for kind in type(error).__mro__],
        text=str(error)[:10_000],
        seconds=seconds,
        peak_bytes=_status("VmHWM") - before,
        did=list(did),
    )


def _watch(event: str, given: tuple[Any, ...], folder: Path, did: list[str]) -> None:
    """Notes what is never done, and files that are written outside the folder."""
    if event in _NEVER:
        did.append(f"{event} {given!r:.200}")
    elif event == "open" and isinstance(given[0], str | bytes) and given[2] & os.O_ACCMODE:
        place = Path(os.path.realpath(os.fsdecode(given[0])))
        if not place.is_relative_to(folder.resolve()):
            did.append(f"wrote {given[0]!r}")


def _status(name: str) -> int:
    """A number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    _main()
