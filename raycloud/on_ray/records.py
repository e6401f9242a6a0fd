"""What one start of a run keeps: its log, its ledger, its checkpoints; and who is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raycloud.events import RunFinished
from raycloud.on_ray.manifests import Publishing, found_back
from raycloud.on_ray.outlets import for_the_log
from raycloud.order import ledger_line

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest, Store
    from raycloud.commands import Publish
    from raycloud.events import Event
    from raycloud.on_ray.outlets import Outlets
    from raycloud.on_ray.ray_cluster import RayCluster
    from raycloud.on_ray.session import Session
    from raycloud.report.recorder import Recorder


class RunRecords:
    """The `Records` of a run directory and a store; all it is told, the session's observer is, too.

    Args:
        session: The start.
        recorder: The run directory's.
        outlets: Trackers, and the members' own logs.
        store: Where checkpoints are.
        origin: The checkpoint with which this start began; None: there is none.
        cluster: Gives what members' own logs have said, and sees what is logged.
    """

    def __init__(
        self,
        session: Session,
        recorder: Recorder,
        outlets: Outlets,
        store: Store,
        origin: Manifest | None,
        cluster: RayCluster,
    ) -> None:
        """Keep nothing yet."""
        self._recorder, self._outlets, self._cluster = recorder, outlets, cluster
        self._observer = session.observer
        self._store, self._origin = store, origin
        self._publishing = Publishing(store, session)

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
        return [*self._publishing.poll(), *self._outlets.poll(self._cluster.lines())]

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
        """Write the last events, and the summary; returns that.

        Args:
            status: How the run ended.
            why: What ended it, where it failed.
            steps: How many are committed.
            predicted: What the last plan said of a step.
            at_once: Whoever watches wants it to end now.
        """
        for notice in self._outlets.poll(self._cluster.lines()):
            self.log(notice)
        for notice in self._outlets.close(status, at_once=at_once):
            self.log(notice)
        self.log(RunFinished(status=status, steps=steps, error=why))
        return self._recorder.publish_summary(predicted=predicted).to_record()
