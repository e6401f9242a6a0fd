"""SIGTERM to a process, as a notice that it is going to leave.

A worker of Ray 2.60 sets a handler that raises SystemExit before it takes its first task, runs an
actor's constructor in its main thread, and there lets Python's handlers run every 10 ms while the
methods of an actor with `max_concurrency` run in other threads. So a handler that the constructor
sets takes the place of Ray's, and is heard at once. Ray's own ends the process once methods that
are under way have returned. Its raylet sends SIGTERM, too, and SIGKILL 0.1 s later, where it ends a
worker itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue

from raycloud.preemption.leaving import Leaving

DEADLINE_S = 25.0  # Kubernetes and Slurm kill what is left 30 s after SIGTERM


def on_sigterm(tell: Callable[[Leaving], None], deadline_s: float = DEADLINE_S) -> None:
    """Let the first SIGTERM to this process be a notice, once, and the second end it as before.

    To be called in the main thread. Whoever was to be called before is called by the second
    SIGTERM, and by one that this process sends to itself at the deadline. A child that is forked
    later ends as before with the first one.

    Args:
        tell: Called in a thread of its own, so it may wait for locks.
        deadline_s: Seconds until the process ends.

    Raises:
        ValueError: This is not the main thread.
    """
    before, process = signal.getsignal(signal.SIGTERM), os.getpid()
    # Its `put` may interrupt whatever the main thread is at; starting a thread may not.
    came: SimpleQueue[int] = SimpleQueue()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def notice(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL if before is None else before)
        if os.getpid() == process:
            came.put(number)
        else:
            end()

    def wait() -> None:
        came.get()
        try:
            tell(Leaving(reason="its process got SIGTERM", deadline_s=deadline_s, node=False))
            threading.Event().wait(deadline_s)
        finally:
            end()

    signal.signal(signal.SIGTERM, notice)
    threading.Thread(target=wait, name="sigterm", daemon=True).start()
