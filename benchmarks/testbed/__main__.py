"""The command line: `python -m benchmarks.testbed --help`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.testbed import commands
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.cluster import ClusterError
from benchmarks.testbed.events import ScheduleError
from benchmarks.testbed.ground import MissingError
from benchmarks.testbed.groups import QuotaError
from benchmarks.testbed.machine import MachineError
from benchmarks.testbed.shell import LateError, ToolError
from benchmarks.testbed.spec import SpecError
from benchmarks.testbed.traces import TraceError

PROGRAM = "python -m benchmarks.testbed"
_INTERRUPTED = 128 + signal.SIGINT
_ASKED_WRONG = (SpecError, ScheduleError, TraceError)
_WENT_WRONG = (
    MissingError,
    ClusterError,
    LateError,
    MachineError,
    QuotaError,
    ToolError,
    commands.NoSuchError,
)
_DESCRIPTION = """\
Several machines on one Linux box: own addresses, limited links and processors, real faults.
docs/testbed.md explains a spec file line by line. Needs root; `check` says what else."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: done; 1: it did not work; 2: what was asked cannot be; of `run` that of its command.
    """
    given, command = _split(sys.argv[1:] if words is None else list(words))
    options = _parser().parse_args(given)
    wants = options.name in {"run", "exec"}
    if wants != bool(command):
        _parser().error(
            f"{options.name}: write the command after --, as in `{PROGRAM} {options.name} … -- ls`"
            if wants
            else f"{options.name}: takes no command, but there is one after --"
        )
    # Whoever ends us, the bed is removed in order; its reaper is for SIGKILL.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return _do(options, command)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except _ASKED_WRONG as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _WENT_WRONG as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace, command: Sequence[str]) -> int:
    match options.name:
        case "up":
            spec, schedule = commands.read(
                options.spec, schedule=options.schedule, trace=_trace(options)
            )
            return commands.up(Testbed(spec), schedule, ray=options.ray)
        case "run":
            spec, schedule = commands.read(options.spec, schedule=options.schedule, trace=None)
            return commands.run(Testbed(spec), command, schedule, ray=options.ray)
        case "exec":
            return commands.execute(options.id, options.node, command)
        case "ls":
            return commands.ls()
        case "clean":
            return commands.clean()
        case "check":
            return commands.check()
    raise AssertionError(options.name)  # argparse knows no other


def _trace(options: argparse.Namespace) -> commands.Replay | None:
    if options.trace is None:
        return None
    return commands.Replay(
        file=Path(options.trace) if options.trace else None,
        start_hour=options.start_hour,
        hours=options.hours,
        seconds_per_hour=options.seconds_per_hour,
        notice_s=options.notice_s,
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those after the first `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    each = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    up = each.add_parser("up", help="make a testbed and hold it until Ctrl-C")
    run = each.add_parser("run", help="make one, run `-- COMMAND` on its head, remove it")
    for one in (up, run):
        one.add_argument("spec", type=Path, metavar="SPEC", help="YAML file of nodes and trunks")
        one.add_argument("--ray", action="store_true", help="with Ray on every machine")
        one.add_argument("--schedule", type=Path, metavar="FILE", help="YAML file of events")
    trace = up.add_argument_group("a spot trace, in place of a schedule")
    trace.add_argument(
        "--trace", nargs="?", const="", metavar="FILE", help="without FILE: the window S7 replays"
    )
    trace.add_argument("--start-hour", type=float, default=0.0, metavar="H", help="of FILE")
    trace.add_argument("--hours", type=float, metavar="H", help="of FILE (default: to its end)")
    trace.add_argument("--seconds-per-hour", type=float, default=60.0, metavar="S")
    trace.add_argument("--notice-s", type=float, default=0.0, metavar="S", help="0: none")
    execute = each.add_parser("exec", help="run `-- COMMAND` on a node of a testbed")
    execute.add_argument("id", metavar="ID", help="such as rt1a2b")
    execute.add_argument("node", metavar="NODE", help="such as n1, or head")
    each.add_parser("ls", help="the testbeds of this machine")
    each.add_parser("clean", help="remove what is left of testbeds whose owner has ended")
    each.add_parser("check", help="whether there can be a testbed here, and what is missing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
