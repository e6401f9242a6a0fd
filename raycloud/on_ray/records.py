"""What one start of a run keeps: its log, its ledger, its checkpoints; and who is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raycloud import __version__
from raycloud.events import (
    DataPrepared,
    Event,
    Noticed,
    PartWritten,
    Printed,
    RolledBack,
    RunFinished,
)
from raycloud.on_ray.checkpoints import CheckpointPublisher, found_back
from raycloud.order import ledger_line
from raycloud.redact import redacted
from raycloud.report.data import brief
from raycloud.report.recorder import Journals
from raycloud.report.tracking import Trackers
from raycloud.worker.outbox import PRINTED

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest, Store
    from raycloud.commands import Publish
    from raycloud.on_ray.cluster import RayCluster
    from raycloud.on_ray.session import Session
    from raycloud.report.recorder import Recorder
    from raycloud.worker.outbox import LogLines

_AT_ONCE_S = 1.0  # to wait for trackers where someone wants the run to end now


class RunRecords:
    """The `Records` of a run directory and a store; all it is told, the session's observer is, too.

    The cluster gives what members' own logs have said, and sees what is logged.
    """

    def __init__(
        self,
        session: Session,
        recorder: Recorder,
        sinks: LogSinks,
        store: Store,
        origin: Manifest | None,
        cluster: RayCluster,
    ) -> None:
        self._recorder, self._sinks, self._cluster = recorder, sinks, cluster
        self._observer = session.observer
        self._store, self._origin = store, origin
        self._publishing = CheckpointPublisher(store, session)

    @property
    def busy(self) -> bool:
        """See `Records.busy`."""
        return self._publishing.busy

    def log(self, event: Event, word: tuple[int, int] | None = None) -> None:
        """See `Records.log`."""
        told = for_the_log(event)
        self._recorder.record(told, word)
        self._observer(told)
        self._cluster.see(event)

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Records.add_to_ledger`."""
        self._recorder.append_ledger([ledger_line(one).rstrip("\n") for one in records])

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:
        """See `Records.publish`."""
        self._publishing.publish(command, samples=samples, ledger=ledger)

    def find_back(self, published: int | None, newest: int | None) -> None:
        """See `Records.find_back`."""
        self._publishing.find_back(
            partial(found_back, self._store, self._origin, published, newest)
        )

    def results(self) -> list[Event]:
        """See `Records.results`."""
        self._recorder.keep_up()
        return [*self._publishing.poll(), *self._sinks.poll(self._cluster.lines())]

    def end(self, wait_s: float) -> None:
        """Ask the store for nothing more; what is under way may end within so long."""
        self._publishing.close(wait_s)

    def close(
        self,
        status: str,
        why: str | None,
        *,
        steps: int,
        predicted: Mapping[str, Any] | None,
        at_once: bool = False,
    ) -> dict[str, Any]:
        """Write the last events, and the summary; returns that."""
        for notice in self._sinks.poll(self._cluster.lines()):
            self.log(notice)
        for notice in self._sinks.close(status, at_once=at_once):
            self.log(notice)
        self.log(RunFinished(status=status, steps=steps, error=why))
        return self._recorder.publish_summary(predicted=predicted).to_record()


class LogSinks:
    """Trackers and the members' own logs. What goes wrong with them is a notice, once."""

    def __init__(self, session: Session) -> None:
        folder, self._observer = session.directory.path, session.observer
        self._journals: Journals | None = Journals(folder / "logs")
        self._trackers: Trackers | None = Trackers(session.job, folder, version=__version__)
        self._trouble: list[Noticed] = []

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Tell trackers the measures after `step` steps. Returns at once."""
        if self._trackers is not None:
            self._trackers.add(t, step, values)

    def poll(self, lines: Iterable[LogLines]) -> list[Noticed]:
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

    def _show(self, lines: LogLines) -> None:
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
