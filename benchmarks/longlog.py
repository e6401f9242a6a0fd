"""How long a run of weeks is read: `status`, `report`, and what `--resume` does before it places.

    python -m benchmarks.longlog

A simulated run of eight members, one of which dies, is recorded for ten minutes. Its last report is
then repeated, a line each second as a real run writes it, until the log is that of 30 days (about
1.5 GB). The snapshot beside it is that of a run which was killed just before the next one was due:
the longest rest to be read. Whole processes are timed, imports and all; printed are seconds and the
most memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycloud.clock import SystemClock, VirtualClock
from raycloud.control import Control
from raycloud.events import Event, RunStarted, StepsCommitted
from raycloud.report.log import Tail, entries_of
from raycloud.report.recorder import Recorder
from raycloud.report.snapshot import EVERY, keep
from raycloud.report.state import RunState
from raycloud.simulate import Scenario, simulate
from raycloud.simulate.scenario import Fault, Kind
from raycloud.spec import load_job
from raycloud.spec.rundir import RunDirectory

MEMBERS, DAYS = 8, 30
MOST_S, MOST_MB = 2.0, 300.0  # the limits
_FOLDED_S = 300  # what is long past is folded by reports of so many seconds
_ROOT = Path(__file__).parents[1]
_CLOCK = SystemClock()
_RECORDER = (
    "import pathlib, sys; from raycloud.clock import SystemClock; "
    "from raycloud.report.recorder import Recorder; from raycloud.spec.rundir import RunDirectory; "
    "Recorder(RunDirectory(pathlib.Path(sys.argv[1])), SystemClock()).close()"
)


class _Clock(VirtualClock):
    """A clock that is set."""

    def at(self, now_s: float) -> None:
        """It is `now_s` seconds."""
        self.advance(now_s - self.monotonic_s())


def simulated(run: RunDirectory) -> None:
    """Record ten minutes of a simulated run, in which a member dies and another takes its place."""
    clock = _Clock()
    dies = Fault(at_s=120.0, kind=Kind.DIE)
    scenario = Scenario(
        seed=1, members=MEMBERS, lasts_s=600.0, micro_batch=8, every_steps=500, faults=(dies,)
    )
    take = Control.on
    with Recorder(run, clock) as recorder:

        def taken(control: Control, event: Event, now_s: float) -> Any:
            clock.at(now_s)
            recorder.record(event)
            return take(control, event, now_s)

        recorder.record(RunStarted(job="gpt", version="0"))
        Control.on = taken  # type: ignore[method-assign]
        try:
            simulate(scenario)
        finally:
            Control.on = take  # type: ignore[method-assign]


def lengthened(log: Path) -> None:
    """Repeat the newest report of all members, a second apart, and make the last snapshot."""
    fold = RunState()
    for entry in Tail(log).rest():
        fold.apply(*entry)
    before = log.read_text().splitlines()
    record = next(record for record in map(json.loads, reversed(before)) if _is_of_all(record))
    same, each = record["same"], record["each"]
    t, step, rate = record["t"], max(each.pop("last_step")), max(each["micro_batches"]) // 2
    del each["first_step"]
    record |= {"t": "@", "same": {**same, "first_step": "@", "last_step": "@"}}
    record["words"] = list(range(MEMBERS))
    head, until, to, tail = json.dumps(record, separators=(",", ":")).split('"@"')
    entries = list(entries_of(f"{head}{t}{until}{step}{to}{step + rate}{tail}"))
    seconds = DAYS * 24 * 3600
    kept, size = seconds - (EVERY // MEMBERS - 1), 0
    with log.open("a") as file:
        for second in range(seconds):
            if second == kept:
                file.flush()
                size = log.stat().st_size
            first = step + second * rate
            file.write(f"{head}{t + second + 1}{until}{first}{to}{first + rate}{tail}\n")
    for second in range(0, kept, _FOLDED_S):
        end = min(second + _FOLDED_S, kept)
        for one in (entry for entry in entries if isinstance(entry.event, StepsCommitted)):
            steps = {"first_step": step + second * rate, "last_step": step + end * rate}
            fold.apply(t + end, replace(one.event, **steps))
    keep(log, fold, size=size, lines=len(before) + kept)


def _is_of_all(record: Mapping[str, Any]) -> bool:
    """Whether it is one line of all members' reports, which end at different steps."""
    return len(record.get("members", ())) == MEMBERS and "last_step" in record.get("each", ())


def timed(*arguments: object) -> tuple[float, float]:
    """Seconds and megabytes that a process takes."""
    began_s = _CLOCK.monotonic_s()
    with subprocess.Popen([str(a) for a in arguments], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} ended with {process.returncode}")
    return _CLOCK.monotonic_s() - began_s, used.ru_maxrss / 1024


def main() -> int:
    """Measure, print, and end with 1 where a limit is not held."""
    folder = Path(tempfile.mkdtemp(prefix="longlog", dir=os.environ.get("TMPDIR", "/tmp")))
    try:
        run = RunDirectory(folder / "run")
        run.path.mkdir()
        run.write_job(load_job(_ROOT / "jobs/gpt.yaml", []))
        simulated(run)
        lengthened(run.events_jsonl)
        print(f"{DAYS} days, {MEMBERS} members: {run.events_jsonl.stat().st_size / 1e9:.2f} GB")
        raycloud = Path(sys.executable).with_name("raycloud")
        asked = {
            "status": (raycloud, "status", run.path),
            "report": (raycloud, "report", run.path),
            "resume": (sys.executable, "-c", _RECORDER, run.path),
        }
        held = True
        for name, arguments in asked.items():
            seconds, megabytes = min(timed(*arguments) for _ in range(3))
            held &= seconds <= MOST_S and megabytes <= MOST_MB
            print(
                f"{name:8} {seconds:5.2f} s of {MOST_S:.0f}   {megabytes:4.0f} MB of {MOST_MB:.0f}"
            )
    finally:
        shutil.rmtree(folder)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
