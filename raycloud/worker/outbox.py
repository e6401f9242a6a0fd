"""What a member sends to its driver: the outbox of its events, and the lines of its log.

Events are delivered at least once. A driver that is killed may take some with it that it had
fetched: each has a number, and is sent to the next driver again unless the log has it.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO, cast

from raycloud.events import MemberLeaving
from raycloud.redact import redact_text

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Event, MemberReady

FORMAT = 1  # of a line

MOST_LETTERS = 8192  # of a message; the rest is cut off
_MOST_LOOKED_INTO = 4 * MOST_LETTERS
MOST_WAITING = 2000  # lines that wait to be fetched
RATE_PER_S = 100.0
BURST = 1000.0
PRINTED = "print"  # the logger's name in lines that were printed


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """An event of a member, with its number; a member's are counted from 1."""

    member: int
    number: int
    event: Event


class Outbox:
    """A member's events that may not be in the log yet, in order. Not thread-safe."""

    def __init__(self, member: int) -> None:
        self._member = member
        self._kept: deque[OutboxEntry] = deque()
        self._last = self._sent = 0  # numbers

    @property
    def unsent(self) -> bool:
        """Whether there are events that this driver was not sent."""
        return self._sent < self._last

    def add(self, events: Iterable[Event]) -> None:
        """Take in what is to be sent."""
        for event in events:
            self._last += 1
            self._kept.append(OutboxEntry(self._member, self._last, event))

    def take(self, written: int) -> list[OutboxEntry]:
        """What the driver was not sent; it has written down all up to number `written`."""
        self._forget(written)
        found = [entry for entry in self._kept if entry.number > self._sent]
        self._sent = self._last
        return found

    def resend(self, written: int) -> None:
        """Send another driver, whose log ends with number `written`, all that comes after it."""
        self._forget(written)
        self._sent = min(written, self._last)

    def rejoin_as(self, member: int) -> Outbox:
        """The outbox of the process as another member; that its machine leaves is sent again."""
        found = Outbox(member)
        events = [entry.event for entry in self._kept]
        found.add(replace(e, member=member) for e in events if isinstance(e, MemberLeaving))
        return found

    def _forget(self, written: int) -> None:
        while self._kept and self._kept[0].number <= written:
            self._kept.popleft()


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A member that has the state of the training, and goes on while no driver is there.

    Attributes:
        ready: What it said of itself when it could compute.
        members: Those of the generation that it met as last, by rank.
        newest: The newest generation that it knows of, also one that is planned.
        changes: The highest number of a change that it was sent.
        grown: The data has grown since it began.
    """

    member: int
    ready: MemberReady
    members: tuple[int, ...]
    generation: int
    newest: int
    changes: int
    grown: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLines:
    """Lines of a member's log, each a JSON object without its newline."""

    member: int
    lines: tuple[str, ...]


class LogCapture(logging.Handler):
    """Keeps what this process logs, from INFO up, and prints, for the run directory.

    At most 100 lines a second after a burst of 1000: what is beyond that is counted, and the count
    is a line of its own. Lines leave the member with its events; nothing is written on its node.
    `step` gives the one being computed.
    """

    def __init__(self, member: int, clock: Clock, step: Callable[[], int | None]) -> None:
        super().__init__(logging.INFO)
        self.member, self._clock, self._step = member, clock, step
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._allowed = BURST
        self._refilled_s = clock.monotonic_s()
        self._guard = threading.Lock()

    def listen(self, logger: logging.Logger | None = None) -> None:
        """Keep what `logger` (None: the root) gets from now on, from INFO up."""
        logger = logging.getLogger() if logger is None else logger
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; a message that cannot be made is told as such."""
        with self._guard:
            if not self._allows():
                self._left_out += 1
                return
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        except Exception as error:  # noqa: BLE001 - whatever the arguments' own code raises
            message = f"{record.msg!r} cannot be written: {type(error).__name__}"
        line = self._line(record.levelname, record.name, message)
        with self._guard:
            self._lines.append(line)

    def capture(self, stream: TextIO) -> TextIO:
        """A stream in the place of this one, whose whole lines are kept as well."""
        return cast("TextIO", _Captured(stream, self._printed))

    def _printed(self, text: str) -> None:
        self.emit(logging.LogRecord(PRINTED, logging.INFO, "", 0, "%s", (text,), None))

    def fetch(self) -> list[LogLines]:
        """What came since the last call."""
        with self._guard:
            if self._left_out:
                text = f"{self._left_out} lines were left out: too many at once"
                self._lines.append(self._line("WARNING", "raycloud", text))
                self._left_out = 0
            found = tuple(self._lines)
            self._lines.clear()
        return [LogLines(member=self.member, lines=found)] if found else []

    def _allows(self) -> bool:
        now_s = self._clock.monotonic_s()
        gained = (now_s - self._refilled_s) * RATE_PER_S
        self._refilled_s, self._allowed = now_s, min(BURST, self._allowed + gained)
        if self._allowed < 1.0 or len(self._lines) >= MOST_WAITING:
            return False
        self._allowed -= 1.0
        return True

    def _line(self, level: str, logger: str, message: str) -> str:
        try:
            step = self._step()
        except AttributeError:  # the member that knows it is being made
            step = None
        record = {
            "format": FORMAT,
            "t": round(self._clock.unix_s(), 6),
            "level": level,
            "logger": redact_text(logger),
            "message": _cut(message),
            "step": step,
        }
        return json.dumps(record, separators=(",", ":"))


class _Captured:
    """A text stream that hands on what is written to it, and gives each whole line to `keep`."""

    def __init__(self, stream: TextIO, keep: Callable[[str], None]) -> None:
        self._stream, self._keep, self._begun = stream, keep, ""

    def write(self, text: str) -> int:
        """Hand it on; of a line written over, as by progress bars, the last text is kept."""
        written = self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._begun = self._begun.rpartition("\r")[2][-_MOST_LOOKED_INTO:]
        for line in lines:
            if shown := line.rstrip("\r").rpartition("\r")[2].rstrip():
                self._keep(shown)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _cut(message: str) -> str:
    """A message without secrets, of the most letters that are kept."""
    text = redact_text(message[:_MOST_LOOKED_INTO])  # before it is cut: half a secret has no shape
    beyond = len(message) - _MOST_LOOKED_INTO
    # Where it had to be cut before, what is left may end in half a secret.
    most = MOST_LETTERS if beyond <= 0 else min(MOST_LETTERS, max(0, len(text) - MOST_LETTERS))
    if len(text) <= most:
        return text
    return f"{text[:most]}... ({len(text) - most + max(0, beyond)} letters cut off)"
