"""A member of a gloo group in a process of its own, which does what is written to it, line by line.

`python -m tests.gloo_peer PORT RANK SIZE NUMBERS`: it meets the others, and says `met`. Then
`reduce` begins an exchange of so many numbers, `wait` says how the newest ended, `cpu SECONDS` what
part of a core the process took meanwhile, and `hang_up` hangs up.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time

import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net.gloo import GlooTransport
from raycloud.net.transport import Work

_HOST = "127.0.0.1"


def main() -> None:
    """Until the end of what is written."""
    port, rank, size, numbers = map(int, sys.argv[1:])
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)
    member = GlooTransport(store, rank=rank, size=size, address=_HOST)
    works: list[Work] = []
    say("met")
    for line in sys.stdin:
        match line.split():
            case ["reduce"]:
                works.append(member.all_reduce(torch.ones(numbers)))
                say("begun")
            case ["wait", seconds]:
                say(ended(works[-1], float(seconds)))
            case ["hang_up"]:
                member.hang_up()
                say("over")
            case ["cpu", seconds]:
                began_s, used_s = time.monotonic(), time.process_time()
                threading.Event().wait(float(seconds))
                say(str((time.process_time() - used_s) / (time.monotonic() - began_s)))


def ended(work: Work, seconds: float) -> str:
    """How it ended, or that it has not."""
    try:
        return "complete" if work.wait(seconds) else "open"
    except TransportError:
        return "broken"


def say(what: str) -> None:
    """One line, at once."""
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
