"""Runs: what they left (`report`, `compare`, `audit`), and those that go on, here or on a cluster.

`status`, `logs`, `stop`, `scale` and `watch` are for the latter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.bounded import expanded
from raycloud.cli.shell import (
    STOPPED,
    PlainOption,
    RunDirectoryArgument,
    command,
    complete_run,
    echo_json,
    is_plain,
    print_summary,
)
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.on_ray.jobs_api import ClusterRun, JobsApi
    from raycloud.report.run_status import RunStatus
    from raycloud.report.runs import Listed
    from raycloud.report.watch import Lines, Watched

JobsAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The Jobs API of a cluster, e.g. http://127.0.0.1:8265; without it "
        "RAY_API_SERVER_ADDRESS, or runs on this machine.",
    ),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Send the token in clear to another machine.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory here; or a run's id or name on a cluster.",
        autocompletion=complete_run,
    ),
]


_NOT_EXACT = 1
AUDIT_EXIT_CODES = (
    "Exit codes: 0 exact; 1 not exact: the samples are named; 2 there is no such run, or its log "
    "or ledger is damaged; 3 a disk failed; 4 raycloud's own fault."
)


@command()
def report(
    run: RunDirectoryArgument,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
    plain: PlainOption = False,
) -> None:
    """Show the summary of a run, also of one that is still going or was killed."""
    from raycloud.report.summary import of_run

    summary = of_run(run)
    if as_json:
        echo_json(summary.to_record())
    else:
        print_summary(summary, run, plain=plain)


@command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...", help="The directories of the runs.", autocompletion=complete_run
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
    plain: PlainOption = False,
) -> None:
    """Set runs side by side: in what their jobs differ, then what came of them.

    Runs may be in any state, also still going. Percentages are the distance from the first run.
    """
    if len(runs) < 2:  # noqa: PLR2004 - one run has nothing to be compared with
        raise typer.BadParameter("give two runs or more", param_hint="RUN RUN...")
    from raycloud.report import comparison

    found = comparison.compare(runs)
    if as_json:
        echo_json(found.to_record())
        return
    width = shutil.get_terminal_size((100, 24)).columns
    lines = comparison.comparison_lines(found, width=width)
    if is_plain(sys.stdout, plain=plain):
        typer.echo("\n".join(text for _, text in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for style, text in lines:
        console.print(Text(text, style=style, no_wrap=True, overflow="ignore"))


@command(epilog=AUDIT_EXIT_CODES)
def audit(
    run: RunDirectoryArgument,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The audit as JSON.")] = False,
) -> None:
    """Prove from a run's ledger that each sample counted exactly once, or name those that did not.

    Of a run in any state, as far as it has come. Beside it stand the members that were lost, and
    how the run recovered.
    """
    from raycloud.report import audit as auditing

    found = auditing.audit(run)
    if as_json:
        echo_json(found.to_record())
    else:
        typer.echo(auditing.audited_text(found))
    if not found.exact:
        raise typer.Exit(_NOT_EXACT)


@command()
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, or an id or name; without it, all.",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how runs stand: step, loss, rate, members, recoveries, checkpoint, cost so far.

    Of a cluster's runs that have ended, the newest 20 are asked for their last numbers.
    """
    from raycloud.report.runs import listed_text, record_of, run_text

    found, place, notes = _found(run, address, insecure=insecure)
    if as_json:
        echo_json(record_of(found, place))
        return
    now_t = SystemClock().unix_s()
    if run is None:
        typer.echo("\n".join([listed_text(found, place, now_t), *notes]))
    else:
        typer.echo(run_text(found[0], now_t))


@command()
def logs(
    run: Run,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    member: Annotated[
        int | None, typer.Option(metavar="N", help="What member N logged, instead.")
    ] = None,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="A JSON object a line: a card, a note, or a member's entry."),
    ] = False,
    plain: PlainOption = False,
) -> None:
    """Show what a run says; with --follow as it comes. Ctrl-C ends the showing, not the run."""
    if follow and member is not None:
        raise typer.BadParameter("shows what is there: leave --follow out", param_hint="--member")
    lines = _lines(run, address, insecure=insecure, member=member, follow=follow, raw=as_json)
    try:
        if as_json:
            for line in lines:
                typer.echo(_record(line, is_entry=member is not None))
            return
        from raycloud.report.progress import show_log

        # The display is drawn behind stderr, so both have to be a terminal for it.
        plain = is_plain(sys.stdout, plain=plain) or is_plain(sys.stderr, plain=plain)
        show_log(lines, plain=plain, say=typer.echo)
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None


@command()
def stop(
    run: Run,
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
) -> None:
    """Ask a run to write a checkpoint and end, as Ctrl-C does; returns once it is asked."""
    if (directory := _local_run(run, address)) is not None:
        from raycloud.report.runs import stop_driver

        pid = stop_driver(directory)
        typer.echo(f"asked {run}, driven by process {pid}, to write a checkpoint and end")
        return
    jobs = _jobs(address, insecure=insecure)
    found = jobs.find(run)
    jobs.stop(found)
    typer.echo(f"asked {found.id} to write a checkpoint and end")


@command()
def scale(
    run: Run,
    workers: Annotated[
        str | None,
        typer.Argument(metavar="WORKERS", help="How many, or the fewest and the most: 4, 2:6."),
    ] = None,
    *,
    servers: Annotated[
        int | None, typer.Option("--servers", metavar="N", help="How many servers.")
    ] = None,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
) -> None:
    """Change how many workers or servers a run may have while it goes on; returns once it is asked.

    More workers join as soon as there are machines for them, and the last ones leave between two
    steps. Other servers are filled while training goes on, and take the place of all there were.
    The job file keeps its own numbers, which a resumed run begins with.
    """
    from raycloud.report.runs import ask_driver, ask_for_servers

    if workers is None and servers is None:
        raise typer.BadParameter("say how many WORKERS, or --servers")
    if (directory := _local_run(run, address)) is not None:
        if workers is not None:
            typer.echo(f"asked {run} for {ask_driver(directory, workers)} workers")
        if servers is not None:
            ask_for_servers(directory, servers)
            typer.echo(f"asked {run} for {servers} servers")
        return
    jobs = _jobs(address, insecure=insecure)
    found = jobs.find(run)
    asked = [] if workers is None else [workers]
    asked += [] if servers is None else ["--servers", str(servers)]
    for line in jobs.asked(found, ["scale", found.directory, *asked]):
        typer.echo(line)


@command(name="set")
def set_fields(
    run: Run,
    fields: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE...", help="codec, topology, period or ratio of sync."),
    ],
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
) -> None:
    """Change how a run's updates travel while it goes on; returns once it is asked.

    What is left out is the default: `raycloud set RUN codec=int4 period=8`. It is in force from the
    same step on all workers. The job file keeps its own; a resumed run goes on by what was set.
    """
    from raycloud.report.runs import ask_for_point

    if (directory := _local_run(run, address)) is not None:
        typer.echo(f"asked {run} for {ask_for_point(directory, fields)}")
        return
    jobs = _jobs(address, insecure=insecure)
    found = jobs.find(run)
    for line in jobs.asked(found, ["set", found.directory, *fields]):
        typer.echo(line)


def _local_run(run: str, address: str | None) -> Path | None:
    """The run directory that is meant, if one here is."""
    from raycloud.errors import RunDirectoryError
    from raycloud.report.runs import is_run
    from raycloud.spec.rundir import RUNS

    if not run.strip():  # as of a variable that is not set: it is the current directory for Path
        raise RunDirectoryError(
            f"{run!r} names no run", hint="`raycloud status` lists the runs there are"
        )
    if address is not None:
        return None
    for directory in (expanded(Path(run)), RUNS / run):
        if is_run(directory):
            return directory
    if _jobs_address(address) is not None:
        return None
    raise RunDirectoryError(
        f"{run} is no run directory, nor is there one in {RUNS}/",
        hint="name one that holds job.yaml; or give the --address of a cluster's Jobs API",
    )


def _jobs_address(address: str | None) -> str | None:
    from raycloud.spec.environment import Environment

    return address or Environment.from_process().jobs_address


def _jobs(address: str | None, *, insecure: bool) -> JobsApi:
    from raycloud.on_ray.jobs_api import JobsApi

    return JobsApi.at(address, insecure=insecure)


def _found(
    run: str | None, address: str | None, *, insecure: bool
) -> tuple[list[Listed], str, list[str]]:
    """What is asked for, where it is, and what is to be said below a list of it."""
    from raycloud.report.runs import Listed, runs_below, status_in, status_or_why
    from raycloud.spec.rundir import RUNS

    clock, place = SystemClock(), f"{RUNS}/ on this machine"
    if run is not None and (here := _local_run(run, address)) is not None:
        return [Listed(id=str(here), card=status_in(here, clock))], place, []
    if run is None and _jobs_address(address) is None:
        here_are = runs_below()
        return [Listed(id=str(p), card=status_or_why(p, clock)) for p in here_are], place, []
    jobs = _jobs(address, insecure=insecure)
    found = [jobs.find(run)] if run is not None else jobs.with_cards(jobs.runs())
    runs = [Listed(id=one.id, card=one.standing(clock), place=one.node_ip) for one in found]
    return runs, jobs.address, _notes(found)


def _notes(runs: list[ClusterRun]) -> list[str]:
    """Why runs in a list stand there with nothing but what Ray says of them."""
    from raycloud.on_ray.jobs_api import ENDED_CARDS
    from raycloud.redact import redact_text
    from raycloud.report.figures import printable_line

    notes = [printable_line(redact_text(f"{one.id}: {one.unread}")) for one in runs if one.unread]
    older = sum(not one.alive for one in runs) - ENDED_CARDS
    if older > 0:
        notes.append(f"{older} older runs were not asked: `raycloud status RUN` shows one")
    return ["", *notes] if notes else []


def _lines(
    run: str,
    address: str | None,
    *,
    insecure: bool,
    member: int | None,
    follow: bool,
    raw: bool,
) -> Iterable[str]:
    here = _local_run(run, address)
    if here is not None:
        from raycloud.report.runs import log_lines, member_lines

        if member is not None:
            return member_lines(here, member, raw=raw)
        return log_lines(here, SystemClock(), follow=follow)
    jobs = _jobs(address, insecure=insecure)
    found = jobs.find(run)
    if member is not None:
        words = ["logs", found.directory, "--member", str(member)]
        return jobs.asked(found, [*words, "--json"] if raw else words)
    return jobs.follow(found) if follow else jobs.log(found)


def _record(line: str, *, is_entry: bool) -> str:
    """A line as a JSON object: how the run stood, a note for people, or a member's entry."""
    from raycloud.redact import redact_text
    from raycloud.report.run_status import parse_line

    if is_entry:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                return line
    line = line.rstrip("\r\n")
    status = parse_line(line)
    note = {"kind": "note", "text": redact_text(line)}
    return json.dumps(note if status is None else {"kind": "card", **status.to_record()})


_REDRAW_S = 0.25
_LINE_S = 5.0
_CARD_S = 1.0


@command()
def watch(
    run: RunDirectoryArgument,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="How the run stands as lines of JSON, until it ends.")
    ] = False,
    plain: PlainOption = False,
) -> None:
    """Watch a run on a terminal page, also over SSH: it reads the run's log, and nothing else.

    The page stays until q or Ctrl-C, which do not touch the run. In a pipe, or with --plain, it is
    lines, and they end with the run.
    """
    with _ended_by_signals():
        from raycloud.report.progress import status_text
        from raycloud.report.watch import Lines, Watched

        watched = Watched.of(run)
        if as_json:
            lines = Lines(watched, line=_card_json, every_s=_CARD_S, notes=False)
            _follow_to_the_end(watched, lines)
        elif is_plain(sys.stdout, plain=plain):
            lines = Lines(watched, line=status_text, every_s=_LINE_S, notes=True)
            _follow_to_the_end(watched, lines)
        else:
            _show_page(watched)
            # The page is gone from the screen; what it said last stays.
            typer.echo(status_text(watched.status(SystemClock().unix_s())))


def _card_json(status: RunStatus) -> str:
    return json.dumps(status.to_record(), allow_nan=False)


def _follow_to_the_end(watched: Watched, lines: Lines) -> None:
    """Print the lines of each event, until the log ends with its run, or its driver is gone."""
    from raycloud.report.runs import is_driven

    clock, gone = SystemClock(), False
    while True:
        entries = watched.read()
        for t, event, _ in entries:
            for line in lines.see(t, event):
                typer.echo(line)
        if entries:
            gone = False
            continue
        if watched.ended:
            return
        if gone:
            for line in lines.gone():
                typer.echo(line)
            return
        gone = watched.tail.path.exists() and not is_driven(watched.directory, clock)
        sys.stdout.flush()
        if not gone:  # else the end of its log is read first
            select.select([], [], [], _REDRAW_S)  # until the log may have grown


def _show_page(watched: Watched) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from raycloud.report.watch import page_lines

    clock, console = SystemClock(), Console(highlight=False, markup=False, emoji=False)
    with _keys() as asked_to_end, Live(console=console, auto_refresh=False, screen=True) as live:
        drawn_s = -_REDRAW_S
        while True:
            entries = watched.read()
            for t, event, _ in entries:
                watched.see(t, event)
            now_s = clock.monotonic_s()
            if not entries or now_s - drawn_s >= _REDRAW_S:
                width, height = console.size
                page = page_lines(watched, now_t=clock.unix_s(), width=width, height=height)
                live.update(Group(*page), refresh=True)
                drawn_s = now_s
            if asked_to_end(0.0 if entries else _REDRAW_S):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Keys come one by one and are not shown.

    Yields:
        A function that waits for a key, so many seconds at most, and says whether it asked to end.
    """
    if sys.stdin is None or not sys.stdin.isatty():  # None: it was closed
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    descriptor = sys.stdin.fileno()

    def asked_to_end(seconds: float) -> bool:
        if not select.select([descriptor], [], [], seconds)[0]:
            return False
        keys = os.read(descriptor, 64)
        return not keys or any(key in b"qQ" for key in keys)  # none: the terminal is gone

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield asked_to_end
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that ends this process lets it put the terminal back first, as Ctrl-C does.

    Raises:
        typer.Exit: With 130, after one.
    """

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
