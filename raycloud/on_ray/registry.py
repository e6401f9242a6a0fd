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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from raycloud.events import Noticed, Observed
from raycloud.report.card import Identity, carded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.clock import Clock
    from raycloud.spec import Job

    Observer = Callable[[Observed], None]

WORD = "raycloud."  # what begins the names of our metadata
ASKED = "raycloud.asks"  # a job that asks something of a run carries this, and is no run itself

_CARD_S = 5.0
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
        whose = Identity.of(directory)
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", whose.run)[:80]
        return cls(
            run=whose.run,
            job=job.name,
            directory=whose.directory,
            log=f"raycloud-{name}-{os.getpid()}.log",
            python=sys.executable,
        )

    def to_metadata(self) -> dict[str, str]:
        """As Ray keeps it."""
        return {
            f"{WORD}run": self.run,
            f"{WORD}job": self.job,
            f"{WORD}directory": self.directory,
            f"{WORD}log": self.log,
            f"{WORD}python": self.python,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Registration | None:
        """What `to_metadata` said; None: nothing is said of a run."""
        if not any(name.startswith(WORD) for name in metadata) or ASKED in metadata:
            return None
        told = {name.removeprefix(WORD): str(text) for name, text in metadata.items()}
        return cls(
            run=told.get("run", ""),
            job=told.get("job", ""),
            directory=told.get("directory", ""),
            log=told.get("log", ""),
            python=told.get("python", ""),
        )


@contextlib.contextmanager
def logged(
    job: Job, registration: Registration, clock: Clock, observer: Observer
) -> Iterator[Observer]:
    """An observer that also writes the run's log among those of Ray.

    Where that cannot be written, the observer is told, and the run goes on without it.
    """
    try:
        file = _open(registration.log)
    except OSError as error:
        why = f"{error.strerror or error}"
        observer(Noticed(what="`raycloud status` will not show how it stands", detail={"why": why}))
        yield observer
        return
    with file:
        log = _Log(file, clock)
        whose = Identity(run=registration.run, directory=registration.directory)
        with carded(job, clock, log.card, note=log.note, identity=whose) as see:

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


def _open(name: str) -> TextIO:
    import ray

    # Ray has no public name for the directory of its logs; it is part of the paths that it shows.
    node: Any = ray._private.worker._global_node  # noqa: SLF001
    return (Path(node.get_logs_dir_path()) / name).open("a", encoding="utf-8")
