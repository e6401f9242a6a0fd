"""What a simulated fleet is like, and what befalls it."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycloud.control import ControlSettings
from raycloud.order import Position


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One run's circumstances."""

    settings: ControlSettings
    samples: int
    steps: int
    every: int | None
    seed: int
    delay_s: float
    speeds: tuple[float, ...]
    sizes: tuple[tuple[int, int], ...] = ()  # (epoch, samples) of data that grew before the start
    grows: tuple[tuple[float, int], ...] = ()  # (seconds, samples more)
    stops_s: tuple[float, ...] = ()
    dies_s: tuple[float, ...] = ()
    leaves_s: tuple[float, ...] = ()  # a notice; some seconds later it dies
    breaks_s: tuple[float, ...] = ()
    diverges_s: tuple[float, ...] = ()  # a step is not finite, and all are to go back
    rooms: tuple[tuple[float, int], ...] = ()  # (seconds, how many members the machines hold)
    clumsy: int = 0  # so many of those that were to join die before they are ready
    freezes_s: float | None = None
    fails_s: float | None = None
    never_ready: bool = False


@dataclass
class Body:
    """One simulated member."""

    outbox_s: float = 0.0  # its last word arrives then
    reported: int | None = None  # None: it has no state yet
    micro_batches: int = 0
    compute_s: float = 0.0
    flushed_s: float = 0.0
    generation: int = 0
    mute: bool = False
    ended: bool = False  # and never comes back
    due_s: float = 0.0  # by when it is to answer the call that it was to answer last
    holds: set[int] = field(default_factory=set)


class Samples:
    """Which samples a step takes, by the definition; for a fleet with its `scene` and `sizes`."""

    def size(self, epoch):
        return max(samples for first, samples in self.sizes.items() if first <= epoch)

    def extend(self, at, samples):
        """What is new belongs to the first epoch that begins at `at` or later."""
        if samples > max(self.sizes.values()):
            self.sizes[at.epoch + (at.offset > 0)] = samples

    def settled(self, at):
        """The next sample that is taken."""
        cut = self.scene.settings
        left = self.size(at.epoch) - at.offset
        if left < (cut.global_batch if cut.drop_last else 1):
            return self.settled(Position(epoch=at.epoch + 1))
        return at

    def after(self, at):
        return self.settled(Position(epoch=at.epoch, offset=at.offset + self.taken(at)))

    def cut(self, step):
        """Micro-batches of a step that is computed."""
        _, start, stop = self.spans[step]
        return -(-(stop - start) // self.scene.settings.micro_batch)

    def taken(self, at):
        return min(self.scene.settings.global_batch, self.size(at.epoch) - at.offset)
