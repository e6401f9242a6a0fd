"""A run directory on this machine: how its run stands, who drives it, and what it says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raycloud.bounded import LARGEST_BYTES, json_value, open_regular, text_lines
from raycloud.errors import JobError, MachineError, RaycloudError, RunDirectoryError
from raycloud.events import DataPrepared, Event
from raycloud.report.figures import printable_line
from raycloud.report.log import Entry, entries_of
from raycloud.report.notes import note
from raycloud.report.run_status import (
    Identity,
    RunStatus,
    status_of,
    to_line,
    total_steps,
)
from raycloud.report.snapshot import state_of
from raycloud.report.state import Tally
from raycloud.spec.rundir import RUNS, RunDirectory, ask_range, parse_range

if TYPE_CHECKING:
    from raycloud.clock import Clock

_PROC = Path("/proc")
_LOCKS = _PROC / "locks"
_PID, _INODE = 4, 5  # fields of a line there
_LOOK_S = 0.3  # between looks at a log that grows
_FRESH_S = 60.0  # a log that was written since then may have a driver elsewhere


def runs_below(root: Path = RUNS) -> list[Path]:
    """The run directories in a folder, the one written last first."""
    found = [path.parent for path in root.glob("*/events.jsonl")]
    return sorted(found, key=lambda path: (path / "events.jsonl").stat().st_mtime, reverse=True)


def is_run(directory: Path) -> bool:
    """Whether there is a run."""
    return RunDirectory(directory).job_yaml.is_file()


def standing_of(directory: Path, clock: Clock) -> RunStatus:
    """How the run kept in a directory stands; one that nobody drives any more was killed.

    Whether anybody does is what `is_driven` can tell from here.

    Raises:
        RunDirectoryError: There is no run, or its log cannot be read.
        SpecError: Its job cannot be read.
    """
    held = driver_of(directory) is not None  # before reading: its last words are read
    tally = state_of(RunDirectory(directory).events_jsonl).tally
    alive = _is_alive(directory, tally, clock, held=held)
    return _card(directory, tally, clock, alive=alive)


def standing_or_why(directory: Path, clock: Clock) -> RunStatus:
    """The same; of a run that cannot be read, why: one of many does not hide the others."""
    try:
        return standing_of(directory, clock)
    except RaycloudError as error:
        whose = Identity.of(directory)
        return RunStatus(
            run=whose.run,
            job="",
            status="unreadable",
            t=clock.unix_s(),
            error=error.message,
            directory=whose.directory,
        )


def is_driven(directory: Path, clock: Clock) -> bool:
    """Whether someone drives a run that has not ended, as far as can be told from here.

    On another machine or in another container that shares the directory, a driver holds a lock
    that is not seen here. So where none is seen, a log that was written within the last minute
    speaks for a driver, too: one that was killed here is missed once that minute is over.

    Raises:
        RunDirectoryError: There is no run.
    """
    return driver_of(directory) is not None or _is_fresh(directory, clock)


def driver_of(directory: Path) -> int | None:
    """The process on this machine that writes the run's log; None: there is none.

    Found by the lock that it holds on the log, for which nothing is locked here: a driver that
    starts at this moment would take that for another one. A holder that this user may not look
    into, as it is another user's, counts.

    Raises:
        RunDirectoryError: There is no run.
    """
    log = _log_of(directory)
    try:
        locks = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:  # not a Linux: nobody can be told from here
        return None
    for line in locks:
        fields = line.split()
        if len(fields) <= _INODE or fields[1] != "FLOCK":
            continue
        pid, (*device, inode) = int(fields[_PID]), fields[_INODE].split(":")
        if pid <= 0 or int(inode) != log.st_ino:
            continue
        has_open = _has_open(pid, log)
        if has_open or (has_open is None and _may_be_on(device, log)):
            return pid
    return None


def stop_driver(directory: Path) -> int:
    """Ask the run in a directory to write a checkpoint and end; the process that was asked.

    Raises:
        JobError: Nobody drives it on this machine.
        MachineError: Its driver cannot be reached.
    """
    pid = driver_of(directory)
    if pid is None:
        raise JobError(
            f"nobody on this machine drives the run in {directory}",
            hint="it has ended, or is driven elsewhere: `raycloud status` shows it, and "
            "`raycloud stop ID --address` reaches it on a cluster",
        )
    try:
        process = os.pidfd_open(pid)
        try:
            if driver_of(directory) != pid:  # it ended, and its number may be another's by now
                raise ProcessLookupError(f"process {pid} has ended")
            if _has_open(pid, _log_of(directory)) is None:
                raise PermissionError("it may not be looked into")
            signal.pidfd_send_signal(process, signal.SIGTERM)
        finally:
            os.close(process)
    except OSError as error:
        raise MachineError(
            f"cannot reach the driver of {directory}, process {pid}: {error}",
            hint="ask as the user who started it",
        ) from error
    return pid


def ask_driver(directory: Path, workers: str) -> str:
    """Ask the run in a directory for other workers, as people write them: how many it then has.

    Raises:
        JobError: Nobody drives it on this machine, or that is no range for it.
        MachineError: Its driver cannot be reached.
    """
    job = RunDirectory(directory).job()
    most, why = job.micro_batches, f"a step has {job.micro_batches} micro-batches"
    if isinstance(job.elastic.shares, tuple):
        most, why = (
            len(job.elastic.shares),
            f"elastic.shares names {len(job.elastic.shares)} workers",
        )
    asked = parse_range(workers, most, why)
    if driver_of(directory) is None:
        raise JobError(
            f"nobody on this machine drives the run in {directory}",
            hint="it has ended, or is driven elsewhere: `raycloud status` shows it, and "
            "`raycloud scale ID WORKERS --address` reaches it on a cluster",
        )
    ask_range(directory, asked)
    return f"{asked['min_workers']} to {asked['max_workers']}"


def log_lines(directory: Path, clock: Clock, *, follow: bool) -> Iterator[str]:
    """A run's notes and cards, as the log of a submitted job has them.

    Args:
        directory: Where the run is kept.
        clock: For the cards.
        follow: Go on until the run has ended.

    Raises:
        RunDirectoryError: There is no run, or its log cannot be read.
    """
    path, tally, ended = RunDirectory(directory).events_jsonl, Tally(), threading.Event()
    notes = _Notes()
    try:
        file = open_regular(path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {error.strerror}", hint="name a run directory"
        ) from error
    with file:
        while True:
            held = driver_of(directory) is not None  # before reading: its last words are read
            for t, event, _ in _new(file, path):
                tally.apply(t, event)
                text = notes.of(event)
                if text:
                    yield text
            alive = _is_alive(directory, tally, clock, held=held)
            yield to_line(_card(directory, tally, clock, alive=alive))
            if not follow or not alive:
                return
            ended.wait(_LOOK_S)


class _Notes:
    """What stays on the screen of each event."""

    def __init__(self) -> None:
        self._prepared: set[tuple[str, int]] = set()

    def of(self, event: Event) -> str | None:
        if isinstance(event, DataPrepared):  # every member tells it
            told = (event.split, event.version)
            if told in self._prepared:
                return None
            self._prepared.add(told)
        text = note(event)
        return None if text is None else printable_line(text)


def _new(file: IO[bytes], path: Path) -> Iterator[Entry]:
    """The entries written since the last call; a line that is not whole yet is left for later."""
    while True:
        at = file.tell()
        line = file.readline(LARGEST_BYTES + 1)
        if not line.endswith(b"\n") and len(line) <= LARGEST_BYTES:
            file.seek(at)
            return
        try:
            yield from entries_of(line.decode("utf-8", errors="replace"))
        except ValueError as error:
            raise RunDirectoryError(
                f"{path} cannot be read: {error}",
                hint="read this run with the raycloud that wrote it, or a newer one",
            ) from error


def _card(directory: Path, tally: Tally, clock: Clock, *, alive: bool) -> RunStatus:
    """The card now; of a run that has ended or was killed, that of its last moment."""
    run = RunDirectory(directory)
    steps = total_steps(run.job(), tally.epoch_samples) if is_run(directory) else None
    now_t, session = clock.unix_s(), tally.session
    if not alive and session is not None:
        now_t = session.ended_t or session.started_t
    card = status_of(tally, now_t=now_t, steps=steps, identity=Identity.of(directory))
    return card if alive else card.after_end()


def _is_alive(directory: Path, tally: Tally, clock: Clock, *, held: bool) -> bool:
    """Whether a run goes on: its log is held; or has no last word, and was written just now."""
    return held or (tally.status == "unfinished" and _is_fresh(directory, clock))


def _is_fresh(directory: Path, clock: Clock) -> bool:
    return abs(clock.unix_s() - _log_of(directory).st_mtime) < _FRESH_S


def _log_of(directory: Path) -> os.stat_result:
    log = RunDirectory(directory).events_jsonl
    try:
        return log.stat()
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} holds no run: {log.name} cannot be read", hint="name a run directory"
        ) from error


def _has_open(pid: int, file: os.stat_result) -> bool | None:
    """Whether a process has a file open; None: this user may not know."""
    hidden = False
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            try:
                if os.path.samestat(link.stat(), file):
                    return True
            except PermissionError:
                hidden = True
            except OSError:  # closed meanwhile
                continue
    except PermissionError:
        hidden = True
    except OSError:  # it has ended; or /proc shows nobody the processes of others
        hidden = _is_anothers(pid)
    return None if hidden else False


def _is_anothers(pid: int) -> bool:
    """Whether a process is there that this user may not even send a signal to."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _may_be_on(device: list[str], file: os.stat_result) -> bool:
    """Whether the device of a lock may be that of a file."""
    major, minor = (int(part, 16) for part in device)
    # Where the kernel makes the number up (btrfs, networks), the two may differ.
    return os.major(file.st_dev) == 0 or os.makedev(major, minor) == file.st_dev


LOGS = "logs"  # below the run directory


def member_lines(directory: Path, member: int, *, raw: bool) -> Iterator[str]:
    """The lines of a member's log; `raw` as they are kept.

    Raises:
        RunDirectoryError: The member has logged nothing, or its log cannot be read.
    """
    path = directory / LOGS / f"member-{member}.jsonl"
    try:
        file = open_regular(path)
    except OSError as error:
        there = sorted(p.stem.removeprefix("member-") for p in path.parent.glob("member-*.jsonl"))
        known = f"members that have: {', '.join(there)}" if there else "no member has"
        raise RunDirectoryError(
            f"member {member} of {directory} has logged nothing", hint=known
        ) from error
    with file:
        try:
            for line in text_lines(file):
                yield line.rstrip("\n") if raw else entry_text(line)
        except ValueError as error:
            raise RunDirectoryError(
                f"{path} cannot be read: {error}", hint="it is damaged: move it away"
            ) from error


def entry_text(line: str) -> str:
    """An entry as a line for people; what is no entry, as it stands.

    >>> entry_text('{"t":0,"level":"INFO","logger":"my.task","message":"hello","step":3}')
    '00:00:00 INFO my.task: hello (step 3)'
    """
    try:
        entry: Any = json_value(line, constants=True)
        at = datetime.fromtimestamp(float(entry["t"]), tz=UTC).strftime("%H:%M:%S")
        text = f"{at} {entry['level']} {entry['logger']}: {entry['message']}"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return printable_line(line)
    step = entry.get("step")
    return printable_line(text if step is None else f"{text} (step {step})")
