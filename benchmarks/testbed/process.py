"""A command that was started on a machine of a testbed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.testbed.shell import LateError


class Process:
    """A command started on a machine."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        """Wrap a started process.

        Args:
            popen: The process.
            log: Where its output goes.
        """
        self._popen = popen
        self.log = log

    @property
    def pid(self) -> int:
        """Its id, the same inside and outside."""
        return self._popen.pid

    def let_go(self) -> None:
        """Let it become its command; called once by who started it."""
        gate = self._popen.stdin
        if gate is not None:
            gate.write(b"go\n")
            gate.close()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._popen.poll()

    def wait(self, limit_s: float) -> int:
        """Wait for its end.

        Args:
            limit_s: Seconds to wait at most.

        Returns:
            Its exit status, negative for a signal.

        Raises:
            LateError: It still runs.
        """
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LateError(f"process {self.pid}: still runs after {limit_s:g} s") from None
