"""A run's numbers on the metrics port of the node that its driver is on, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event as ThreadEvent
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Self

from raycloud.events import Printed
from raycloud.report.exported import MEASURES, TAGS, values
from raycloud.report.tally import Tally

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.report.standing import Identity
    from raycloud.spec.job import Job

_EVERY_S = 1.0


class Gauges:
    """Takes a run's events, and sets Ray's gauges once a second, also while nothing happens.

    Ray forgets what a gauge was set to once that has been scraped.

    Args:
        job: What is asked.
        identity: Whose numbers they are.
        clock: Where seconds come from.
        observer: Is told of every event first.
    """

    def __init__(
        self, job: Job, identity: Identity, clock: Clock, observer: Callable[[Observed], None]
    ) -> None:
        """Ray is attached by now; nothing is set before this is entered."""
        from ray.util.metrics import Gauge

        self._job, self._identity, self._clock = job, identity, clock
        self._observer = observer
        self._tally = Tally()
        self._turn = Lock()  # of the tally
        self._over = ThreadEvent()
        self._labels = dict(zip(TAGS, (job.name, identity.run), strict=True))
        self._tags = {measure.name: measure.tag for measure in MEASURES}
        self._gauges: dict[str, Any] = {
            measure.name: Gauge(
                measure.name,
                description=measure.meaning,
                tag_keys=TAGS + ((measure.tag,) if measure.tag else ()),
            )
            for measure in MEASURES
        }
        self._thread = Thread(target=self._keep_set, name="gauges", daemon=True)

    def __enter__(self) -> Self:
        """Begin to set them."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Set them for the last time."""
        self._over.set()
        self._thread.join()

    def see(self, event: Observed) -> None:
        """Take in what happened."""
        self._observer(event)
        if isinstance(event, Printed):
            return
        with self._turn:
            self._tally.add(self._clock.unix_s(), event)

    def _keep_set(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._set()
        self._set()

    def _set(self) -> None:
        with self._turn:
            known = list(values(self._tally, self._job, self._identity, self._clock.unix_s()))
        for one in known:
            tag = self._tags[one.name]
            labels = self._labels | ({tag: one.of} if tag else {})
            self._gauges[one.name].set(one.value, tags=labels)
