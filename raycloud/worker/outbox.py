"""What a member says to its driver, kept until that has written it down.

A driver that is killed may take words with it that it had fetched. So each has a number, and is
told again to the next driver unless the log has it: none is lost, and none is written twice.
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


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """One of a member's words.

    Attributes:
        member: Whose.
        number: Its words are counted from 1.
        event: What it says.
    """

    member: int
    number: int
    event: Event


class Outbox:
    """A member's words that may not be in the log yet, in order. Not thread-safe.

    Args:
        member: Whose.
    """

    def __init__(self, member: int) -> None:
        """Nothing is said."""
        self._member = member
        self._kept: deque[OutboxEntry] = deque()
        self._said = self._told = 0

    @property
    def untold(self) -> bool:
        """Whether there are words that this driver has not been told."""
        return self._told < self._said

    def add(self, events: Iterable[Event]) -> None:
        """The member says these."""
        for event in events:
            self._said += 1
            self._kept.append(OutboxEntry(self._member, self._said, event))

    def tell(self, written: int) -> list[OutboxEntry]:
        """What the driver has not been told; it has written down all up to number `written`."""
        self._forget(written)
        found = [word for word in self._kept if word.number > self._told]
        self._told = self._said
        return found

    def again(self, written: int) -> None:
        """Another driver is there, and the log ends with number `written`: tell it the rest."""
        self._forget(written)
        self._told = min(written, self._said)

    def another(self, member: int) -> Outbox:
        """The process's words as another member: of those before, that its machine goes counts."""
        found = Outbox(member)
        told = [word.event for word in self._kept]
        found.add(replace(e, member=member) for e in told if isinstance(e, MemberLeaving))
        return found

    def _forget(self, written: int) -> None:
        while self._kept and self._kept[0].number <= written:
            self._kept.popleft()


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A member that has the state of the training, and goes on while no driver is there.

    Attributes:
        member: Its number.
        ready: What it said of itself when it could compute.
        members: Those of the generation that it met as last, by rank.
        generation: That generation.
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


FORMAT = 1

MOST_LETTERS = 8192  # of a message; the rest is cut off
_MOST_LOOKED_INTO = 4 * MOST_LETTERS
MOST_WAITING = 2000  # lines that wait to be fetched
RATE_PER_S = 100.0
BURST = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLines:
    """Lines of a member's log, each a JSON object without its newline."""

    member: int
    lines: tuple[str, ...]


PRINTED = "print"  # the logger's name in lines that were printed


class LogCapture(logging.Handler):
    """Takes in what is logged in this process, at most 100 lines a second after a burst of 1000.

    What is beyond that is counted, and the count is a line of its own.

    Args:
        member: Whose it is.
        clock: For the seconds in the lines, and for the rate.
        step: The step being computed; None before the first.
    """

    def __init__(self, member: int, clock: Clock, step: Callable[[], int | None]) -> None:
        """Nothing is taken in before `listen`."""
        super().__init__(logging.INFO)
        self.member, self._clock, self._step = member, clock, step
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._room = BURST
        self._refilled_s = clock.monotonic_s()
        self._guard = threading.Lock()

    def listen(self, logger: logging.Logger | None = None) -> None:
        """Take in what `logger` gets from now on, from INFO up; None: the process's root."""
        logger = logging.getLogger() if logger is None else logger
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take in a record; a message that cannot be made is told as such."""
        with self._guard:
            if not self._has_room():
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

    def hear(self, stream: TextIO) -> TextIO:
        """A stream in the place of this one, whose whole lines are taken in as well."""
        return cast("TextIO", _Heard(stream, self._printed))

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

    def _now(self) -> int | None:
        """The step; None also while the member that knows it is being made."""
        try:
            return self._step()
        except AttributeError:
            return None

    def _has_room(self) -> bool:
        now_s = self._clock.monotonic_s()
        gained = (now_s - self._refilled_s) * RATE_PER_S
        self._refilled_s, self._room = now_s, min(BURST, self._room + gained)
        if self._room < 1.0 or len(self._lines) >= MOST_WAITING:
            return False
        self._room -= 1.0
        return True

    def _line(self, level: str, logger: str, message: str) -> str:
        record = {
            "format": FORMAT,
            "t": round(self._clock.unix_s(), 6),
            "level": level,
            "logger": redact_text(logger),
            "message": _cut(message),
            "step": self._now(),
        }
        return json.dumps(record, separators=(",", ":"))


class _Heard:
    """A text stream that hands on what is written to it, and tells of its lines.

    Args:
        stream: Gets everything.
        tell: Called with each whole line that is not empty.
    """

    def __init__(self, stream: TextIO, tell: Callable[[str], None]) -> None:
        self._stream, self._tell, self._begun = stream, tell, ""

    def write(self, text: str) -> int:
        """Hand it on; of a line written over, as by progress bars, the last text is told."""
        written = self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._begun = self._begun.rpartition("\r")[2][-_MOST_LOOKED_INTO:]
        for line in lines:
            if shown := line.rstrip("\r").rpartition("\r")[2].rstrip():
                self._tell(shown)
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
