"""Starts a command again when it dies, as systemd or Kubernetes would for a peer without agents."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the command until it ends by itself, or too often, or this process is asked to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, required=True)
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    for _ in range(asked.restarts + 1):
        child = subprocess.Popen(asked.command)

        def pass_on(
            number: int, _: FrameType | None, child: subprocess.Popen[bytes] = child
        ) -> None:
            child.send_signal(number)
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, pass_on)
        code = child.wait()
        print(f"ended with status {code}", flush=True)
        if code == 0:
            return
    sys.exit(1)


if __name__ == "__main__":
    main()
