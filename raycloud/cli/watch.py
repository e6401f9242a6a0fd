"""A run as it goes on, from its log: `watch`."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli import shell
from raycloud.cli.shell import (
    EXIT_CODES,
    STOPPED,
    DebugOption,
    PlainOption,
    RunDirectoryArgument,
    app,
    errors_told,
)
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.report.run_status import RunStatus
    from raycloud.report.watch import Lines, Watched

_REDRAW_S = 0.25
_LINE_S = 5.0
_CARD_S = 1.0


@app.command(epilog=EXIT_CODES)
def watch(
    run: RunDirectoryArgument,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="How the run stands as lines of JSON, until it ends.")
    ] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Watch a run on a terminal page, also over SSH: it reads the run's log, and nothing else.

    The page stays until q or Ctrl-C, which do not touch the run. In a pipe, or with --plain, it is
    lines, and they end with the run.
    """
    with errors_told(debug=debug), _ended_by_signals():
        from raycloud.report.progress import status_text
        from raycloud.report.watch import Lines, Watched

        watched = Watched.of(run)
        if as_json:
            lines = Lines(watched, line=_card_json, every_s=_CARD_S, notes=False)
            _follow_to_the_end(watched, lines)
        elif shell.is_plain(sys.stdout, plain=plain):
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
