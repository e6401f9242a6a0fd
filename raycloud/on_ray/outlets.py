"""Who is told of a run beside its log: trackers, and the files of the members' own logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from raycloud import __version__
from raycloud.events import DataPrepared, Event, Noticed, PartWritten, Printed, RolledBack
from raycloud.redact import redacted
from raycloud.report.data import brief
from raycloud.report.journals import Journals
from raycloud.report.tracking import Trackers
from raycloud.training.journal import PRINTED

if TYPE_CHECKING:
    from raycloud.on_ray.session import Session
    from raycloud.training.journal import Lines

_AT_ONCE_S = 1.0  # to wait for trackers where someone wants the run to end now


class Outlets:
    """What can fail without the run failing: what goes wrong here is a notice, once.

    Args:
        session: The start of the run.
    """

    def __init__(self, session: Session) -> None:
        """Nothing is written, and nobody told, yet."""
        folder, self._observer = session.directory.path, session.observer
        self._journals: Journals | None = Journals(folder / "logs")
        self._trackers: Trackers | None = Trackers(session.job, folder, version=__version__)
        self._trouble: list[Noticed] = []

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Tell trackers the measures after `step` steps. Returns at once."""
        if self._trackers is not None:
            self._trackers.add(t, step, values)

    def poll(self, lines: Iterable[Lines]) -> list[Noticed]:
        """Write what members' logs say; returns what went wrong since the last call."""
        try:
            for one in lines:
                self._show(one)
                if self._journals is not None:
                    self._journals.write(one.member, one.lines)
        except OSError as error:  # a full disk: what the run needs to go on is not written here
            self._journals = None
            self._failed("the members' logs are no longer kept", error)
        try:
            if self._trackers is not None:
                self._trouble += self._trackers.notices()
        except OSError as error:
            self._trackers = None
            self._failed("trackers are told nothing more", error)
        found, self._trouble = self._trouble, []
        return found

    def _show(self, lines: Lines) -> None:
        """Tell whoever watches what was printed; nothing else is done with it."""
        for record in map(json.loads, lines.lines):
            if record["logger"] == PRINTED:
                self._observer(Printed(member=lines.member, text=record["message"]))

    def close(self, status: str, *, at_once: bool = False) -> list[Noticed]:
        """Tell trackers how the run ended, and wait a little for them."""
        if self._trackers is None:
            return []
        try:
            if at_once:
                return self._trackers.close(status, wait_s=_AT_ONCE_S)
            return self._trackers.close(status)
        except OSError as error:
            self._failed("what trackers call the run could not be kept", error)
            return self.poll(())

    def _failed(self, what: str, error: OSError) -> None:
        self._trouble.append(Noticed(what=what, detail={"why": str(error.strerror or error)}))


def for_the_log(event: Event) -> Event:
    """The event as it is kept and shown: without what other files hold, and without secrets."""
    if isinstance(event, PartWritten):  # the manifest says what is in it
        names = ("file", "bytes", "sha256")
        part = {name: event.part["record"][name] for name in names}
        return replace(event, part=part)
    if isinstance(event, DataPrepared):
        event = brief(event)
    if isinstance(event, RolledBack):  # so has the file of the ledger
        event = replace(event, ledger={})
    return redacted(event)
