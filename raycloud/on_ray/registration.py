"""How a run that joined a cluster is found there: words in its Ray job's metadata, and a log.

The log lies among those of Ray on the driver's node, so that the cluster's dashboard serves it to
whoever has the cluster's token. It holds the run's notes and cards, and is removed with Ray's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TextIO

from raycloud.events import Noticed, Observed, Printed
from raycloud.report.progress import shown_as_cards
from raycloud.report.run_status import MEASURES, TAGS, values
from raycloud.report.state import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.clock import Clock
    from raycloud.spec import Job

WORD = "raycloud."  # what begins the names of our metadata
ASKED = "raycloud.asks"  # a job that asks something of a run carries this, and is no run itself

_CARD_S = 5.0
_EVERY_S = 1.0  # between two settings of the gauges
_THIN_BYTES = 1 << 20  # after as many bytes cards come half as often, then a third as often...


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What is said of a run in the metadata of its Ray job.

    Attributes:
        run: The name of its run directory.
        job: The job's name.
        directory: The run directory, on the driver's node.
        log: The name of its log among Ray's logs there; empty: the job's own log is it.
        python: The driver's interpreter, with which it can be asked to stop.
    """

    run: str
    job: str
    directory: str
    log: str = ""
    python: str = ""

    @classmethod
    def of(cls, job: Job, directory: Path) -> Registration:
        """That of a run that this process drives."""
        run = directory.absolute().name
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run)[:80]
        return cls(
            run=run,
            job=job.name,
            directory=str(directory.absolute()),
            log=f"raycloud-{name}-{os.getpid()}.log",
            python=sys.executable,
        )

    def to_metadata(self) -> dict[str, str]:
        """As Ray keeps it."""
        return {f"{WORD}{name}": text for name, text in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Registration | None:
        """What `to_metadata` said; None: nothing is said of a run."""
        if not any(name.startswith(WORD) for name in metadata) or ASKED in metadata:
            return None
        names = (field.name for field in fields(cls))
        return cls(**{name: str(metadata.get(f"{WORD}{name}", "")) for name in names})


@contextlib.contextmanager
def logged(
    job: Job, registration: Registration, clock: Clock, observer: Callable[[Observed], None]
) -> Iterator[Callable[[Observed], None]]:
    """An observer that also writes the run's log among those of Ray.

    Where that cannot be written, the observer is told, and the run goes on without it.
    """
    import ray

    # Ray has no public name for the directory of its logs; it is part of the paths that it shows.
    node: Any = ray._private.worker._global_node  # noqa: SLF001 - as said above
    try:
        file = Path(node.get_logs_dir_path(), registration.log).open("a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        why = f"{error.strerror or error}"
        observer(Noticed(what="`raycloud status` will not show how it stands", detail={"why": why}))
        yield observer
        return
    with file:
        log = _Log(file, clock)
        whose = Path(registration.directory)
        with shown_as_cards(job, clock, log.card, note=log.note, directory=whose) as see:

            def both(event: Observed) -> None:
                observer(event)
                see(event)

            yield both


class _Log:
    """A log that grows slower the longer it is. A full disk ends the log, not the run."""

    def __init__(self, file: TextIO, clock: Clock) -> None:
        self._file, self._clock = file, clock
        self._card_s: float | None = None

    def card(self, line: str) -> None:
        """Write a card, if the last one is old enough; the last one of a run always."""
        now_s = self._clock.monotonic_s()
        every_s = _CARD_S * (self._file.tell() // _THIN_BYTES)
        early = self._card_s is not None and now_s - self._card_s < every_s
        if not early or '"status":"running"' not in line:
            self._card_s = now_s
            self.note(line)

    def note(self, line: str) -> None:
        """Write a line."""
        with contextlib.suppress(OSError):
            self._file.write(line + "\n")
            self._file.flush()


@contextlib.contextmanager
def gauged(
    job: Job, run: str, clock: Clock, observer: Callable[[Observed], None]
) -> Iterator[Callable[[Observed], None]]:
    """An observer that also keeps Ray's gauges set, once a second, also while nothing happens.

    Ray is attached by now; it forgets what a gauge was set to once that has been scraped.
    """
    from ray.util.metrics import Gauge

    labels = dict(zip(TAGS, (job.name, run), strict=True))
    gauges: dict[str, Any] = {
        name: Gauge(name, description=meaning, tag_keys=TAGS + ((tag,) if tag else ()))
        for name, (meaning, tag) in MEASURES.items()
    }
    tally, turn, over = Tally(), Lock(), ThreadEvent()

    def see(event: Observed) -> None:
        observer(event)
        if not isinstance(event, Printed):
            with turn:
                tally.apply(clock.unix_s(), event)

    def set_all() -> None:
        with turn:
            known = list(values(tally, job, clock.unix_s()))
        for name, value, of in known:
            tag = MEASURES[name][1]
            gauges[name].set(value, tags=labels | ({tag: of} if tag else {}))

    def keep_set() -> None:
        while not over.wait(_EVERY_S):
            set_all()
        set_all()

    thread = Thread(target=keep_set, name="gauges", daemon=True)
    thread.start()
    try:
        yield see
    finally:
        over.set()
        thread.join()
