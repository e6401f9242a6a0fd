"""A command in a terminal: a pseudo terminal of a given size, and what its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")
_HOME = "\x1b[H"
_WAIT_S = 30.0

# The command's own terminal, so that Ctrl-C is a signal to it, as its end is, also below nohup.
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios;"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A running command whose standard input, output and error are one terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        """Nothing was read yet."""
        self.process, self._descriptor = process, descriptor
        self.written = ""

    def screen(self) -> str:
        """The newest picture of a page that is drawn from the top left, without colour."""
        return _ESCAPE.sub("", self.written.rpartition(_HOME)[2]).replace("\r\n", "\n")

    def plain(self) -> str:
        """All that was written, without colour."""
        return _ESCAPE.sub("", self.written).replace("\r\n", "\n")

    def wait_for(self, what: Callable[[], bool], seconds: float = _WAIT_S) -> None:
        """Read until something holds."""
        end = time.monotonic() + seconds
        while not what():
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"it did not come:\n{self.plain()[-4000:]}")

    def press(self, keys: str) -> None:
        """Keys, as the terminal sends them."""
        os.write(self._descriptor, keys.encode())

    def resize(self, width: int, height: int) -> None:
        """Make the terminal another size."""
        _size(self._descriptor, width, height)
        os.kill(self.process.pid, signal.SIGWINCH)

    def hang_up(self) -> None:
        """The terminal's window is closed: the command gets SIGHUP, and nobody reads any more."""
        os.close(self._descriptor)
        self._descriptor = -1

    def code(self, seconds: float = _WAIT_S) -> int:
        """Its exit code, once it has ended; what it wrote until then is read."""
        while self._descriptor >= 0 and self._read(seconds):
            pass
        return self.process.wait(seconds)

    def settings(self) -> list[object]:
        """How the terminal is set: whether keys are shown, and more."""
        return termios.tcgetattr(self._descriptor)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        try:
            block = os.read(self._descriptor, 1 << 16)
        except OSError:  # the command has closed its end
            return False
        self.written += block.decode(errors="replace")
        return bool(block)


@contextlib.contextmanager
def terminal(
    *arguments: object, width: int = 100, height: int = 30, folder: Path | None = None
) -> Iterator[Terminal]:
    """Start a command in a terminal; it is killed on the way out if it has not ended."""
    ours, theirs = pty.openpty()
    _size(theirs, width, height)
    variables = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *map(str, arguments)],
        cwd=folder,
        env=variables | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    found = Terminal(process, ours)
    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if found._descriptor >= 0:
            found.hang_up()


def _size(descriptor: int, width: int, height: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
