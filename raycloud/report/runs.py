"""Runs on this machine: who drives one, its status and logs; and lists of runs anywhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value, open_regular, text_lines
from raycloud.errors import JobError, MachineError, RaycloudError, RunDirectoryError, SpecError
from raycloud.events import RunFinished
from raycloud.report.figures import byte_count, duration, figure, printable_line, table
from raycloud.report.log import Tail
from raycloud.report.run_status import RunStatus, status_of, to_line, total_steps
from raycloud.report.snapshot import state_of
from raycloud.report.state import RunState, Tally
from raycloud.spec.load import point_of
from raycloud.spec.rundir import (
    RUNS,
    RunDirectory,
    ask_point,
    ask_range,
    ask_servers,
    parse_range,
)
from raycloud.spec.sections import parse_point

if TYPE_CHECKING:
    from raycloud.clock import Clock

_PROC = Path("/proc")
_LOCKS = _PROC / "locks"
_PID, _INODE = 4, 5  # fields of a line there
_LOOK_S = 0.3  # between looks at a log that grows
_FRESH_S = 60.0  # a log that was written since then may have a driver elsewhere

FORMAT = 1  # of the list of runs

_RUN_HEAD = (
    "run",
    "status",
    "step",
    "loss",
    "samples/s",
    "left",
    "workers",
    "recoveries",
    "checkpoint",
    "cost",
)
_MINUTE_S = 60.0


def runs_below(root: Path = RUNS) -> list[Path]:
    """The run directories in a folder, the one written last first."""
    found = [path.parent for path in root.glob("*/events.jsonl")]
    return sorted(found, key=lambda path: (path / "events.jsonl").stat().st_mtime, reverse=True)


def is_run(directory: Path) -> bool:
    """Whether there is a run."""
    return RunDirectory(directory).job_yaml.is_file()


def status_in(directory: Path, clock: Clock) -> RunStatus:
    """How the run kept in a directory stands; one that is not `is_driven` any more was killed.

    Raises:
        RunDirectoryError: There is no run, or its log cannot be read.
        SpecError: Its job cannot be read.
    """
    held = driver_of(directory) is not None  # before reading: the end of its log is read
    tally = state_of(RunDirectory(directory).events_jsonl).tally
    return _status(directory, tally, clock, alive=_is_alive(directory, tally, clock, held=held))


def status_or_why(directory: Path, clock: Clock) -> RunStatus:
    """The same; of a run that cannot be read, why: one of many does not hide the others."""
    try:
        return status_in(directory, clock)
    except RaycloudError as error:
        place = directory.absolute()
        return RunStatus(
            run=place.name,
            job="",
            status="unreadable",
            t=clock.unix_s(),
            error=error.message,
            directory=str(place),
        )


def is_driven(directory: Path, clock: Clock) -> bool:
    """Whether someone drives a run that has not ended, as far as can be seen from here.

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
    log = _found(directory)
    try:
        locks = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:  # not a Linux: no driver can be found from here
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
        raise _undriven(directory, "stop ID")
    try:
        process = os.pidfd_open(pid)
        try:
            if driver_of(directory) != pid:  # it ended, and its number may be another's by now
                raise ProcessLookupError(f"process {pid} has ended")
            if _has_open(pid, _found(directory)) is None:
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
        most = len(job.elastic.shares)
        why = f"elastic.shares names {most} workers"
    asked = parse_range(workers, most, why)
    if driver_of(directory) is None:
        raise _undriven(directory, "scale ID WORKERS")
    ask_range(directory, asked)
    return f"{asked['min_workers']} to {asked['max_workers']}"


def ask_for_point(directory: Path, words: Sequence[str]) -> str:
    """Ask the run in a directory for another way of updates, as people write it; which it is.

    Raises:
        JobError: Nobody drives it on this machine, its job could not have asked for that, or its
            members have found that there cannot be rounds.
        MachineError: Its driver cannot be reached.
    """
    try:
        told = parse_point(" ".join(words))
    except ValueError as error:
        hint = "write it as `codec=int4 topology=tree period=8`"
        raise SpecError("FIELD=VALUE", " ".join(words), str(error), hint=hint) from None
    run = RunDirectory(directory)
    point = point_of(run.job(), told)
    if driver_of(directory) is None:
        raise _undriven(directory, "set ID FIELD=VALUE")
    if point.period > 1 and (why := state_of(run.events_jsonl).tally.no_rounds):
        what = f"steps of this run cannot be made in rounds: {why}"
        raise SpecError("period", point.period, what, hint="leave it out: each step is exchanged")
    ask_point(directory, told)
    return str(point)


def ask_for_servers(directory: Path, servers: int) -> None:
    """Ask the run in a directory for so many servers.

    Raises:
        JobError: Nobody drives it on this machine, it has none, or that is no number of servers.
        MachineError: Its driver cannot be reached.
    """
    if not RunDirectory(directory).job().servers.shards:
        raise SpecError(
            "--servers",
            servers,
            "the run has no servers, and needs none",
            hint="start one whose job has `servers: 1`, or more",
        )
    if driver_of(directory) is None:
        raise _undriven(directory, "scale ID --servers N")
    ask_servers(directory, servers)


def _undriven(directory: Path, words: str) -> JobError:
    return JobError(
        f"nobody on this machine drives the run in {directory}",
        hint="it has ended, or is driven elsewhere: `raycloud status` shows it, and "
        f"`raycloud {words} --address` reaches it on a cluster",
    )


def log_lines(directory: Path, clock: Clock, *, follow: bool) -> Iterator[str]:
    """A run's notes and cards, as the log of a submitted job has them; `follow`: until it ends.

    Raises:
        RunDirectoryError: There is no run, or its log cannot be read.
    """
    _found(directory)
    tail, state = Tail(RunDirectory(directory).events_jsonl), RunState()
    ended = threading.Event()
    while True:
        held = driver_of(directory) is not None  # before reading: the end of its log is read
        while entries := tail.read():
            for entry in entries:
                _, text = state.apply(*entry)
                if text is not None and not isinstance(entry.event, RunFinished):
                    yield text
        alive = _is_alive(directory, state.tally, clock, held=held)
        yield to_line(_status(directory, state.tally, clock, alive=alive))
        if not follow or not alive:
            return
        ended.wait(_LOOK_S)


def _status(directory: Path, tally: Tally, clock: Clock, *, alive: bool) -> RunStatus:
    """The status now; of a run that has ended or was killed, that of its last moment."""
    run = RunDirectory(directory)
    steps = total_steps(run.job(), tally.epoch_samples) if is_run(directory) else None
    now_t, session = clock.unix_s(), tally.session
    if not alive and session is not None:
        now_t = session.ended_t or session.started_t
    status = status_of(tally, now_t=now_t, steps=steps, directory=directory.absolute())
    return status if alive else status.after_end()


def _is_alive(directory: Path, tally: Tally, clock: Clock, *, held: bool) -> bool:
    """Whether a run goes on: its log is held; or has no last word, and was written just now."""
    return held or (tally.status == "unfinished" and _is_fresh(directory, clock))


def _is_fresh(directory: Path, clock: Clock) -> bool:
    return abs(clock.unix_s() - _found(directory).st_mtime) < _FRESH_S


def _found(directory: Path) -> os.stat_result:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A run in a list, by what it is called in `raycloud status`; `place`: where its driver is."""

    id: str
    card: RunStatus
    place: str = ""

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"id": self.id, "place": self.place, **self.card.to_record()}


def record_of(runs: Sequence[Listed], place: str) -> dict[str, Any]:
    """The list as JSON-ready values; `place` says whose it is."""
    return {"format": FORMAT, "place": place, "runs": [run.to_record() for run in runs]}


def listed_text(runs: Sequence[Listed], place: str, now_t: float) -> str:
    """A line for each run."""
    if not runs:
        return f"{printable_line(place)}: no runs"
    rows = [_RUN_HEAD, *(_run_row(run, now_t) for run in runs)]
    left = [name in {"run", "status"} for name in _RUN_HEAD]
    return "\n".join([printable_line(place), "", *table(rows, left=left)])


def run_text(run: Listed, now_t: float) -> str:
    """How one run stands."""
    card, speed, workers = run.card, [], ""
    if card.samples_per_s is not None:
        speed.append(f"{figure(card.samples_per_s)} samples/s")
    if card.left_s is not None:
        speed.append(f"{duration(card.left_s)} left")
    if card.members:
        members, shares = " ".join(map(str, card.members)), " ".join(map(figure, card.shares))
        workers = f"{card.workers} (members {members}, shares {shares})"
        workers += f" · generation {card.generation}"
    elif card.workers:
        workers = f"{card.ready} of {card.workers} ready"
    saved = "none"
    if card.checkpoint_t is not None:
        saved = f"after step {card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"
    rows = [
        ("error", card.error or ""),
        ("job", card.job),
        ("run", card.run if card.run != run.id else ""),
        ("loss", "" if card.loss is None else figure(card.loss)),
        ("speed", " · ".join(speed)),
        ("workers", workers),
        ("recoveries", card.recoveries_text),
        ("checkpoint", saved),
        ("exchanged", f"{byte_count(card.bytes_sent)} sent" if card.bytes_sent else ""),
        ("cost so far", "" if card.cost is None else figure(card.cost)),
        ("run directory", card.directory + (f" on {run.place}" if run.place else "")),
        ("as of", "" if card.has_ended else ago(now_t - card.t)),
    ]
    shown = [(label, printable_line(text)) for label, text in rows if text]
    title = printable_line(f"{run.id} {card.status}: step {_step(card)}")
    lines = [title, "", *table(shown, left=(True, True))]
    if card.compared:
        so_far = "measured" if card.has_ended else "so far"
        told = [tuple(map(printable_line, one.texts)) for one in card.compared]
        compared = [("", "predicted", so_far, ""), *told]
        lines += ["", *table(compared, left=(True, False, False, True))]
    return "\n".join(lines)


def _run_row(run: Listed, now_t: float) -> list[str]:
    card, saved = run.card, "-"
    if card.checkpoint_t is not None:
        saved = f"{card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"
    cells = (
        run.id if run.id.endswith(card.run) else f"{run.id} ({card.run})",
        card.status,
        _step(card),
        figure(card.loss),
        figure(card.samples_per_s),
        "-" if card.left_s is None else duration(card.left_s),
        str(card.workers),
        card.recoveries_text,
        saved,
        figure(card.cost),
    )
    return [printable_line(cell) for cell in cells]


def _step(card: RunStatus) -> str:
    return f"{card.step}/{card.steps}" if card.steps else str(card.step)


def ago(seconds: float) -> str:
    """How long ago something was.

    >>> ago(0.4), ago(12.3), ago(3725.0), ago(2.6 * 86400)
    ('just now', '12 s ago', '1:02:05 ago', '2 d ago')
    """
    if seconds < 1:
        return "just now"
    days = int(seconds // 86_400)
    if days > 1:
        return f"{days} d ago"
    return f"{duration(seconds) if seconds >= _MINUTE_S else f'{seconds:.0f} s'} ago"
