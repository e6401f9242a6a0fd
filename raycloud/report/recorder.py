"""Recorder: a run's event log, ledger, summary, TensorBoard scalars and members' logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raycloud.errors import MachineError, RunDirectoryError
from raycloud.events import Evaluated, Event, Noticed, RunStarted, StepsCommitted
from raycloud.redact import redact
from raycloud.report import snapshot
from raycloud.report.log import (
    MOST_MERGED,
    Entry,
    cut_torn_line,
    to_line,
    to_merged_line,
    to_microseconds,
)
from raycloud.report.summary import Summary, summarize, write_summary

if TYPE_CHECKING:
    import io

    from raycloud.clock import Clock
    from raycloud.report.state import Tally
    from raycloud.spec.rundir import RunDirectory

_MERGED_S = 1.0  # a report waits so long for the others'
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Recorder:
    """Keeps what lasts of one run. Its files are appended to, so a resumed run goes on in them.

    Every line is in the operating system's hands when a call returns: it survives the death of this
    process, not that of the machine.

    Lines carry unix seconds, but are stamped by the monotonic clock from the moment the recorder
    opened, so that differences between them are durations. `RunStarted` carries the moment at which
    its command started.

    Args:
        run: Where the files go; the directory exists.
        clock: Where seconds come from.
        started_s: `clock.monotonic_s()` when the command started; None: now.
        listener: Called with all scalars: unix seconds, step, values by name.

    Attributes:
        state: What the log comes to.
        lock: A name for the lock that is held on the log; empty where its file system has none.

    Raises:
        RunDirectoryError: The log of the earlier part of this run cannot be read, or another
            process is writing it.
        MachineError: Here and in all methods that write: the files cannot be written.
    """

    def __init__(
        self,
        run: RunDirectory,
        clock: Clock,
        *,
        started_s: float | None = None,
        listener: Callable[[float, int, Mapping[str, float]], None] | None = None,
    ) -> None:
        """Open the files, cut torn last lines off, and take in what the log already holds."""
        self._run, self._clock, self._listener = run, clock, listener
        self._opened_s, self._opened_t = clock.monotonic_s(), clock.unix_s()
        self._started_s = self._opened_s if started_s is None else started_s
        self._scalars: ScalarFile | None = None
        self._reports: list[Entry] = []  # that are to be one line
        self._since_s = 0.0  # the first of them
        with _disk("open", run.events_jsonl):
            self._events = run.events_jsonl.open("a", encoding="utf-8", buffering=1)
            self.lock = _hold(self._events, run.path)
            for path in (run.events_jsonl, run.ledger):
                cut_torn_line(path)
            self.state, tail, self._unkept = snapshot.continued(run.events_jsonl)
            self._size, self._lines = tail.at, tail.lines
            self._snapshot_failed = False
            self._ledger = run.ledger.open("a", encoding="utf-8", buffering=1)

    @property
    def tally(self) -> Tally:
        """See `RunState`."""
        return self.state.tally

    @property
    def written(self) -> Mapping[int, int]:
        """By member, the number of its newest word that is in the log."""
        return self.state.words

    @property
    def first_t(self) -> float:
        """When the run was started first, in unix seconds."""
        if self.tally.sessions:
            return self.tally.sessions[0].started_t
        return to_microseconds(self._opened_t + (self._started_s - self._opened_s))

    def record(self, event: Event, word: tuple[int, int] | None = None) -> None:
        """Append an event to the log, and its numbers to the scalars.

        Members' reports of steps wait until all who compute have reported, for a second at most,
        and are one line; anything else comes after those that wait. What waits is not `written`.

        Args:
            event: What happened.
            word: See `Entry`.

        Raises:
            InternalError: The event holds something that is not a plain value.
        """
        now_s = self._clock.monotonic_s()
        at_s = self._started_s if isinstance(event, RunStarted) else now_s
        # As the log keeps it, so that all that is made from the log is what is made now.
        entry = Entry(to_microseconds(self._opened_t + (at_s - self._opened_s)), event, word)
        if not isinstance(event, StepsCommitted):
            self.flush()
            self._write(to_line(*entry), entry)
            return
        self._since_s = self._since_s if self._reports else now_s
        self._reports.append(entry)
        if len(self._reports) >= min(self.tally.computing, MOST_MERGED):
            self.flush()

    def keep_up(self) -> None:
        """Write the reports that have waited for long enough; costs nothing if there are none."""
        if self._reports and self._clock.monotonic_s() - self._since_s >= _MERGED_S:
            self.flush()

    def flush(self) -> None:
        """Write the reports that wait."""
        reports, self._reports = self._reports, []
        if reports:
            line = to_line(*reports[0]) if len(reports) == 1 else to_merged_line(reports)
            self._write(line, *reports)

    def _write(self, line: str, *entries: Entry) -> None:
        with _disk("write", self._run.events_jsonl):
            self._events.write(line + "\n")
        with _disk("write", self._run.tensorboard):
            for entry in entries:
                point, _ = self.state.apply(*entry)
                if isinstance(entry.event, StepsCommitted) and point is not None:
                    self._add_scalars(entry.t, entry.event)
                elif isinstance(entry.event, Evaluated):
                    metrics = entry.event.metrics
                    values = {f"eval/{name}": value for name, value in metrics.items()}
                    self._publish(entry.t, entry.event.step, values)
        self._size, self._lines = self._size + len(line) + 1, self._lines + 1  # it is ASCII
        self._unkept += len(entries)
        if self._unkept >= snapshot.EVERY:
            self._keep()

    def _keep(self) -> None:
        """Make a snapshot; one that cannot be written is tried later, as the log has all of it."""
        self._unkept, log = 0, self._run.events_jsonl
        try:
            snapshot.keep(log, self.state, size=self._size, lines=self._lines)
        except OSError as error:
            if not self._snapshot_failed:
                self._snapshot_failed = True
                self.record(Noticed(what="the log has no snapshot", detail={"why": str(error)}))

    def append_ledger(self, lines: Iterable[str]) -> None:
        """Append lines to the ledger, given without their newlines."""
        with _disk("write", self._run.ledger):
            self._ledger.write("".join(line + "\n" for line in lines))
            self._ledger.flush()

    def publish_summary(self, *, predicted: Mapping[str, Any] | None = None) -> Summary:
        """Write `summary.json` from all events so far; `predicted` is the plan's expectation."""
        self.flush()
        summary = summarize(self.tally, predicted=predicted)
        with _disk("write", self._run.summary_json):
            write_summary(self._run.summary_json, summary)
        return summary

    def close(self) -> None:
        """Close all files; more than once is fine. Reports that wait are left to who goes on."""
        self._events.close()
        self._ledger.close()
        if self._scalars is not None:
            self._scalars.close()

    def _add_scalars(self, t: float, event: StepsCommitted) -> None:
        values = {
            "train/loss": event.loss,
            "train/grad_norm": event.grad_norm,
            "train/learning_rate": event.learning_rate,
            "train/bytes_sent": float(self.tally.spent.bytes_sent),
        }
        if event.wall_s > 0:
            values["train/samples_per_s"] = event.samples / event.wall_s
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        self._publish(t, event.last_step, known)

    def _publish(self, t: float, step: int, values: Mapping[str, float]) -> None:
        if self._scalars is None:  # so that its import does not delay the first step
            first_step = self.tally.session.from_step if self.tally.session else 0
            self._scalars = ScalarFile(self._run.tensorboard, t, first_step=first_step)
        self._scalars.add(t, step, values)
        if self._listener is not None:
            self._listener(t, step, {n: v for n, v in values.items() if math.isfinite(v)})

    def __enter__(self) -> Self:
        """This recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


def _hold(log: io.TextIOBase, directory: Path) -> str:
    """Let no other process write this run until the log is closed, or this process is dead.

    Returns:
        A name for the lock that is held; empty where there is none, as on some network mounts.
    """
    try:
        fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        log.close()
        raise RunDirectoryError(
            f"another process is writing the run in {directory}",
            hint="wait until it ends, or end it, before going on with its run",
        ) from error
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
            raise
        return ""
    file = os.fstat(log.fileno())
    with contextlib.suppress(OSError):  # not Linux: then no name says on which machine it is held
        return f"{_BOOT.read_text().strip()}:{file.st_dev}:{file.st_ino}"
    return ""


@contextlib.contextmanager
def _disk(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a MachineError that names the file."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot {verb} {path}: {error.strerror or error}",
            hint="free space or permissions there, then go on with `raycloud train --resume`",
        ) from error


_CRC_TABLE = list(range(256))
for _ in range(8):
    _CRC_TABLE = [(one >> 1) ^ (0x82F63B78 if one & 1 else 0) for one in _CRC_TABLE]


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


class ScalarFile:
    """A TensorBoard event file, written without TensorBoard's own writer.

    That one costs 0.2 s to import (tensorboardX: 1 s, and it imports torch); the messages alone
    cost 0.02 s. A file is a sequence of records: length as little-endian uint64, its masked
    CRC-32C, the serialized `Event`, its masked CRC-32C (TensorFlow, "TFRecords format details").
    Readers merge a folder's files in the order of their names.

    Args:
        folder: Where the file goes; it is made if missing.
        t: Unix seconds; part of the file's name.
        first_step: The step after which this file goes on. Readers drop points that older files
            hold beyond it: a resumed run takes them back.
    """

    def __init__(self, folder: Path, t: float, *, first_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - off the start

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        path = folder / f"events.out.tfevents.{int(t):010d}.raycloud.{number:04d}"
        self._file = path.open("xb")
        self._write(self._event(wall_time=t, file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=t, step=first_step + 1, session_log=start))
        self._file.flush()

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Append one point per tag at `step`, and flush."""
        summary = self._summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(self._event(wall_time=t, step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Close the file; more than once is fine."""
        self._file.close()

    def _write(self, event: Any) -> None:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked(length) + data + _masked(data))


MOST_BYTES = 16 * 2**20


class Journals:
    """Writes the members' logs of one run: `logs/member-N.jsonl`, a JSON object per line.

    `{"format":1,"t":unix seconds,"level":"INFO","logger":name,"message":text,"step":n or null}`.
    A file that has grown to 16 MiB becomes `member-N.1.jsonl`, in the place of the one before it.

    Args:
        folder: Where the files go; made with the first line.
        most_bytes: Size at which a file is put aside.
    """

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._seen: set[int] = set()

    def write(self, member: int, lines: Iterable[str]) -> None:
        """Append lines, given without their newlines.

        Raises:
            OSError: They cannot be written.
        """
        path = self._folder / f"member-{member}.jsonl"
        if member not in self._seen:
            self._folder.mkdir(exist_ok=True)
            cut_torn_line(path)
            self._seen.add(member)
        records = (redact(json.loads(line)) for line in lines)  # of a node that may know less
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            size = file.tell()
        if size >= self._most_bytes:
            path.replace(path.with_suffix(".1.jsonl"))
