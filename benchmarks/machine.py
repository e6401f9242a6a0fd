"""What was measured on, and with which versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What is written there while it is measured is no change to what is measured.
_CHANGES = ("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")


def describe(cpus: set[int]) -> dict[str, Any]:
    """The machine, the software, and the commit, as plain values; `cpus` are those measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cpus_used": sorted(cpus),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "raycloud": version("raycloud"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_since_commit": bool(_git(*_CHANGES)),
    }


def load() -> float:
    """Processes that wanted to run, averaged over the last minute: is the machine quiet?"""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor()


def _git(*arguments: str) -> str | None:
    """What git says of the checkout; None where there is no git or no checkout."""
    program = shutil.which("git")
    if program is None:
        return None
    answer = subprocess.run(
        [program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None
