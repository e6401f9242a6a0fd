"""AdaScale: the rate of a larger batch by how much of its gradient is noise, measured as it goes.

Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020. A
batch S times as large as the one that the task's rates are for has a gradient of less variance. Let
that be v, and |G|^2 the squared norm of the expected gradient. A step of the larger batch is then
worth

    r = (S v + |G|^2) / (v + |G|^2),   1 <= r <= S

steps of the smaller one, the gain: S where all is noise, 1 where there is none. An update is made
with r times the rate, and the schedule goes r steps further, so that it counts steps of the smaller
batch, its warm-up, too.

v and |G|^2 are estimated from what the workers' mean gradients differ by, the same on every member
(`sync.gradients.noise_of`). They are averaged over steps as the paper does: by a weight of
1 - S/1000 for what is before, and evenly over the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raycloud.step.stateful import Commit, Stateful

if TYPE_CHECKING:
    import torch

    from raycloud.step.state import Update

_FORGETS = 1000.0  # steps, over S, that are averaged


def gain(scale: float, variance: float, signal: float) -> float:
    """r, of a batch `scale` times as large, whose gradient has this variance; 1 where all is 0.

    >>> gain(4.0, 1.0, 0.0), gain(4.0, 0.0, 1.0), gain(4.0, 1.0, 1.0), gain(4.0, 0.0, 0.0)
    (4.0, 1.0, 2.5, 1.0)
    """
    variance, signal = max(variance, 0.0), max(signal, 0.0)
    whole = variance + signal
    return (scale * variance + signal) / whole if whole > 0.0 else 1.0


class AdaScale(Stateful):
    """Sets by what an update's rate is multiplied, and how far it moves the schedule.

    It commits before the update that goes by it.

    Args:
        scale: S, by how much `global_batch` is larger than `base_batch`.
        micro_batches: Of a full step; a short one, at the end of an epoch, has more variance.
        steps: Of the schedule: it goes no further.
        measured: What the exchange of the step that commits has told, see `noise_of`.
        update: What goes by it.
        notice: Tells a person once that the schedule is over.
    """

    name = "adascale"

    def __init__(
        self,
        scale: float,
        micro_batches: int,
        steps: int,
        *,
        measured: Callable[[], tuple[float, float] | None],
        update: Update,
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._scale, self._micro_batches, self._steps = scale, micro_batches, steps
        self._measured, self._update, self._notice = measured, update, notice
        self._keeps = max(1.0 - scale / _FORGETS, 0.0)
        self.variance = self.signal = 0.0  # averaged
        self.measurements = 0
        self._progress: float | None = 0.0  # None: as far as the schedule, once that is loaded

    @property
    def gain(self) -> float:
        """r, by what is known."""
        return gain(self._scale, self.variance, self.signal)

    @property
    def progress(self) -> float:
        """Steps of the smaller batch."""
        if self._progress is None:
            self._progress = float(getattr(self._update.scheduler, "last_epoch", 0) or 0)
        return self._progress

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`."""
        if (found := self._measured()) is not None:
            variance, signal = found
            self.measurements += 1
            before = min(self._keeps, 1.0 - 1.0 / self.measurements)
            variance *= step.count / self._micro_batches
            self.variance = before * self.variance + (1.0 - before) * variance
            self.signal = before * self.signal + (1.0 - before) * signal
        gained, before_steps = self.gain, min(int(self.progress), self._steps)
        self._progress = self.progress + gained
        after_steps = min(int(self.progress), self._steps)
        self._update.factor, self._update.schedule_steps = gained, after_steps - before_steps
        if before_steps < after_steps == self._steps and step.sums is None:
            what = "the schedule is over: it counts steps of base_batch, by AdaScale's gain"
            self._notice(what, {"step": step.step, "gain": round(gained, 3)})

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        return {
            "variance": self.variance,
            "signal": self.signal,
            "measurements": self.measurements,
            "progress": self.progress,
        }

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has none
        """See `Stateful.load`."""
        self.variance, self.signal = float(values["variance"]), float(values["signal"])
        self.measurements = int(values["measurements"])
        self._progress = float(values["progress"])
        self._update.factor = self.gain

    def begin(self) -> None:
        """See `Stateful.begin`: the schedule stands where it was stepped to."""
        self.variance = self.signal = 0.0
        self.measurements = 0
        self._progress = None
