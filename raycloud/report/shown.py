"""Shows a run's events while it goes on: notes that stay, and one line that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raycloud.report.follow import Follower
from raycloud.report.progress import progress_renderable, progress_text

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.spec.job import Job

_REDRAW_S = 0.2
_PLAIN_LINE_S = 5.0


@contextmanager
def shown_plainly(
    job: Job, clock: Clock, say: Callable[[str], None]
) -> Iterator[Callable[[Observed], None]]:
    """As lines that stay, one every 5 s; `say` prints a line."""
    follower = Follower(
        job,
        clock,
        say=say,
        draw=lambda tally, total: say(progress_text(tally, total)),
        every_s=_PLAIN_LINE_S,
        only_steps=True,
    )
    try:
        yield follower.see
    finally:
        follower.end()


@contextmanager
def shown_live(job: Job, clock: Clock) -> Iterator[Callable[[Observed], None]]:
    """As a line that changes, on the terminal behind stderr, and notes above it."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Follower(
            job,
            clock,
            say=console.print,
            draw=lambda tally, total: live.update(progress_renderable(tally, total), refresh=True),
            every_s=_REDRAW_S,
            only_steps=False,
        ).see
