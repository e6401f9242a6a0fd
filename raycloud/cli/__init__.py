"""The command line: thin layers over what does the work; all printing is here.

What is heavy (torch, ray, pydantic, rich's live display) is imported inside the commands that need
it. Progress, notes and errors go to stderr, results to stdout.
"""

from __future__ import annotations

import sys

from raycloud.cli import (  # each adds its commands
    cache,
    chaos,
    project,
    runs,
    simulate,
    submit,
    sweep,
    train,
)
from raycloud.cli.shell import app
from raycloud.clock import SystemClock

__all__ = [
    "app",
    "cache",
    "chaos",
    "main",
    "project",
    "runs",
    "simulate",
    "submit",
    "sweep",
    "train",
]


def main() -> None:
    """The command `raycloud`."""
    started_s = SystemClock().process_started_s()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?`, and goes on
    app(obj=started_s)
