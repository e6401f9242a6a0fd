"""What a member's code needs of the process, the network and the store that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.checkpoint import Store, open_store
from raycloud.clock import Clock, SystemClock
from raycloud.sync.stream import SOCKETS, Sockets
from raycloud.threads import THREADS, Threads
from raycloud.training.meeting import Meeting, leave, meet

if TYPE_CHECKING:
    import torch

    from raycloud.sync.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a member lives; tests give it another one, where time and faults are a script's.

    Attributes:
        clock: For the seconds reported.
        threads: Where it does what takes its time.
        sockets: Over which states travel from member to member.
        open_store: Opens the place of the checkpoints.
        meet: Meets the others; see `training.meeting.meet`.
        leave: Lets go of what carried a generation's messages.
    """

    clock: Clock = field(default_factory=SystemClock)
    threads: Threads = THREADS
    sockets: Sockets = SOCKETS
    open_store: Callable[[str], Store] = open_store
    meet: Callable[
        [Meeting, str, torch.device, Callable[[], bool]], tuple[Transport, Transport]
    ] = meet
    leave: Callable[[Iterable[Transport]], None] = leave


HOST = Host()
