"""A run's numbers on the metrics port of the node that its driver is on, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raycloud.events import Event, RunFinished
from raycloud.report.exported import MEASURES, TAGS, values
from raycloud.report.tally import Tally

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.report.standing import Identity
    from raycloud.spec.job import Job

_EVERY_S = 1.0


class Gauges:
    """Takes a run's events, and sets Ray's gauges at most once a second.

    Args:
        job: What is asked.
        identity: Whose numbers they are.
        clock: Where seconds come from.
        observer: Is told of every event first.
    """

    def __init__(
        self, job: Job, identity: Identity, clock: Clock, observer: Callable[[Event], None]
    ) -> None:
        """Ray is attached by now; nothing is set before the first event."""
        from ray.util.metrics import Gauge

        self._job, self._identity, self._clock = job, identity, clock
        self._observer = observer
        self._tally = Tally()
        self._set_s: float | None = None
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

    def see(self, event: Event) -> None:
        """Take in what happened."""
        self._observer(event)
        self._tally.add(self._clock.unix_s(), event)
        now_s = self._clock.monotonic_s()
        is_early = self._set_s is not None and now_s - self._set_s < _EVERY_S
        if is_early and not isinstance(event, RunFinished):
            return
        self._set_s = now_s
        for one in values(self._tally, self._job, self._identity, self._clock.unix_s()):
            tag = self._tags[one.name]
            labels = self._labels | ({tag: one.of} if tag else {})
            self._gauges[one.name].set(one.value, tags=labels)
