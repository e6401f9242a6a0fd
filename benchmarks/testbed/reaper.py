"""Removes a bed when its owner dies, in whatever way: `python -m benchmarks.testbed.reaper ID`."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys

from benchmarks.testbed import ground


def main() -> int:
    """Wait for the owner's end, then remove the bed, if it is still there.

    The owner holds the other end of standard input. A process that it forked may hold it too, so
    the owner itself is watched as well.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bed_id")
    bed_id = parser.parse_args().bed_id
    # Who ends the owner by a signal to many must not end the one that cleans up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched = [sys.stdin.fileno()]
    for state in ground.states():
        if state.bed_id == bed_id:
            try:
                watched.append(os.pidfd_open(state.owner_pid))
            except ProcessLookupError:
                break
            if not state.owner_lives:
                break
    else:
        select.select(watched, [], [])
    ground.remove(bed_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
