"""A machine within the machine: its own processes and its own loopback, and it ends as a whole.

`ray stop` ends every Ray of its user that it can see, and `ray symmetric-run` calls it. In here it
sees what was started here, ports are free, and nothing outlives the command.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

_UNSHARE = (
    "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount",
    "--mount-proc", "--net",
)  # fmt: skip

# The loopback of a new network is down. ifreq: the interface's name, then its flags; SIOCSIFFLAGS.
_LOOPBACK_UP = (
    "import fcntl, os, socket, struct, sys;"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 1));"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def inside(*arguments: object) -> list[str]:
    """The command line that runs `arguments` in a machine of their own."""
    words = [str(a) for a in arguments]
    return [*_UNSHARE, sys.executable, "-c", _LOOPBACK_UP, *words]


@functools.cache
def missing() -> str:
    """Why there can be no such machine here; empty where there can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(inside("true"), capture_output=True, text=True, check=False, timeout=30)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


def variables(home: Path, ray_tmpdir: Path) -> dict[str, str]:
    """The environment of a user with this home, who finds `ray` and `raycloud`, and no settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY", "SLURM", "PYTHON", "XDG"))
    }
    commands = str(Path(sys.executable).parent)
    return kept | {
        "HOME": str(home),
        "PATH": f"{commands}{os.pathsep}{kept.get('PATH', '')}",
        "RAY_TMPDIR": str(ray_tmpdir),
        "TERM": "dumb",
    }
