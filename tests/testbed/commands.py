"""Commands that build testbeds themselves, run from start to end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from benchmarks.machine import ROOT

LIMIT_S = 240  # a run takes 15 to 60 s, on a busy machine more


def said(words: Sequence[str]) -> str:
    """What a command prints, without Ray's variables of this process; it has to end well."""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
