"""Checkpoints: when one is made, which are under way, and which may be restored from.

What is remembered here changes here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycloud.commands import Publish
from raycloud.events import Noticed

if TYPE_CHECKING:
    from raycloud.events import CheckpointFailed, PartFailed, PartWritten, WorkerKey

_SELDOM_S = 6 * 3600.0  # between two losses, before any is known; counts as one
_COST_S = 1.0  # of a checkpoint, before one was made
_LEAST_S, _MOST_S = 30.0, 3600.0
_AGAIN_S, _LONGEST_S = 5.0, 300.0  # from one that failed to the next, twice as long each time
_AT_THE_END_S = 30.0  # the longest where nothing is left to do but this

Part = Mapping[str, Any]


def interval_s(cost_s: float, between_losses_s: float) -> float:
    """Seconds of training between two checkpoints with the least time lost to either.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006): with C the cost and M the time between losses,
    sqrt(2CM) (1 + sqrt(C / 2M) / 3 + C / 18M) - C where C < 2M, and M otherwise; its first term
    is Young's (1974).

    >>> round(interval_s(60.0, 86_400.0)), round(interval_s(0.05, 6 * 3600.0), 1)
    (3180, 46.4)
    """
    cost_s = max(cost_s, 1e-3)
    if cost_s >= 2 * between_losses_s:
        return between_losses_s
    ratio = cost_s / (2 * between_losses_s)
    young_s = math.sqrt(2 * cost_s * between_losses_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(kw_only=True, slots=True)
class Checkpoints:
    """When a checkpoint is made, which are under way, and which is the newest that is whole.

    Attributes:
        saves: We say when one is due; else the job does.
        most_failed: So many in a row that cannot be kept end the run.
        last_published: Step of the newest checkpoint that may be restored from; None before the
            first.
        losses: How many members were lost since the run began.
        save_asked: One is to be made, since members leave that are needed.
        publishing: By step, the parts of those that are complete and not yet published.
        damaged: The newest of which all parts were there cannot be published: they are not sound.
        in_a_row: How often checkpoints could not be kept since one was. What fails before another
            one is tried is one incident: members and steps that fail alike count once.
    """

    saves: bool = True
    most_failed: int = 10
    last_published: int | None = None
    losses: int = 0
    save_asked: bool = False
    publishing: dict[int, dict[WorkerKey, Part]] = field(default_factory=dict)
    damaged: bool = False
    in_a_row: int = 0
    _began_s: float = 0.0
    _saved_s: float = 0.0  # when the last one was published, or the run began
    _cost_s: float = 0.0
    _under_way: bool = False  # one was asked for
    _unkept: PartFailed | CheckpointFailed | None = None  # the newest that could not be kept
    _again_s: float | None = None  # when another one is tried
    _counts_s: float = 0.0  # what fails before then is the same incident
    _parts: dict[int, dict[WorkerKey, Part]] = field(default_factory=dict)  # by step
    _divided: dict[int, int] = field(default_factory=dict)  # by step, among which generation
    _counts_from: int = 0  # parts of older generations do not
    _failed: int | None = None  # which of those in `publishing` could not be published
    _whole: int = -1  # step of the newest of which all parts were there

    def begin(self, now_s: float, published: int | None) -> None:
        """The job starts, with this checkpoint as the newest."""
        self._began_s = self._saved_s = now_s
        self.last_published = published

    # ---- when one is made

    def ask(self) -> None:
        """One is to be made as soon as a change can be sent."""
        self.save_asked = True

    def is_due(self, now_s: float) -> bool:
        """Whether one is to be asked for now."""
        if self.save_asked:
            return True
        if self._again_s is not None:
            return now_s >= self._again_s
        if self._under_way or not self.saves:  # what is slow to write to would never be done
            return False
        between_s = (_SELDOM_S + now_s - self._began_s) / (1 + self.losses)
        after_s = interval_s(self._cost_s or _COST_S, between_s)
        return now_s - self._saved_s >= min(max(after_s, _LEAST_S), _MOST_S)

    def save(self) -> None:
        """Members are told to write one: there is no other until it is published."""
        self.save_asked, self._again_s, self._under_way = False, None, True

    def note_loss(self) -> None:
        """A member that computed is lost."""
        self.losses += 1

    # ---- what becomes of it

    def collecting(self, generation: int) -> tuple[int, ...]:
        """Steps of checkpoints of which a part is missing, divided among this one or newer ones."""
        return tuple(sorted(step for step, g in self._divided.items() if g >= generation))

    def missing(self, step: int, keys: Mapping[int, WorkerKey]) -> tuple[int, ...]:
        """The members, of these with their keys, whose part of `step` is missing."""
        parts = self._parts.get(step, {})
        return tuple(member for member, key in keys.items() if key not in parts)

    def take_in(self, event: PartWritten, keys: Mapping[int, WorkerKey]) -> Iterator[Publish]:
        """A member has written its part; to publish if it was the last one.

        Members that meet anew write the checkpoint before their first step again: without effect
        where all of its parts were there before.

        Args:
            event: What it says; maybe of a generation that is not known to be in force yet.
            keys: Of the members among whom the checkpoint is divided, as far as is known, by rank.
        """
        cost_s = event.blocked_s + event.write_s
        self._cost_s = max(cost_s, 0.9 * self._cost_s)  # the slowest; older ones less and less
        if not self._counts(event):
            return
        key = event.replica, event.position
        if event.replica < 0:  # it is not told
            key = keys.get(event.member, key)
        step, parts = event.step, self._parts.setdefault(event.step, {})
        parts[key] = event.part
        if len(parts) < len(keys) or any(known not in parts for known in keys.values()):
            return
        self._forget([at for at in self._divided if at <= step])  # each writes in order
        self._forget_failed()
        self.publishing[step] = {known: parts[known] for known in keys.values()}
        self._whole, self.damaged = step, False
        yield Publish(step=step, parts=self.publishing[step])

    def lack(self, event: PartFailed, now_s: float, *, ends: bool) -> Iterator[Noticed]:
        """A member could not write its part; it may still come, if that is waited for."""
        return self._not_kept(event, now_s, ends=ends) if self._counts(event) else iter(())

    def fail(self, event: CheckpointFailed, now_s: float, *, ends: bool) -> Iterator[Noticed]:
        """It could not be published; it is to be published again, if no newer one is there."""
        if event.step == self._whole:
            self._failed, self.damaged = event.step, event.damaged
        else:
            del self.publishing[event.step]
        return self._not_kept(event, now_s, ends=ends)

    def _counts(self, event: PartWritten | PartFailed) -> bool:
        """Not what is whole, nor where a newer generation has divided it anew."""
        step, generation = event.step, event.generation
        if step <= self._whole or generation < self._counts_from:
            return False
        known = self._divided.get(step, generation)
        if generation > known:
            self._parts.pop(step, None)
        self._divided[step] = max(known, generation)
        return generation >= known

    def _not_kept(
        self, event: PartFailed | CheckpointFailed, now_s: float, *, ends: bool
    ) -> Iterator[Noticed]:
        """Training goes on without it, and another is tried; `ends`: nothing else is left to do."""
        self._unkept, self._under_way = event, False
        if now_s < self._counts_s:
            return
        pause_s = min(
            _AGAIN_S * 2.0 ** min(self.in_a_row, 10), _AT_THE_END_S if ends else _LONGEST_S
        )
        self.in_a_row += 1
        self._counts_s = self._again_s = now_s + pause_s
        if self.in_a_row < self.most_failed:
            yield Noticed(
                what=f"the checkpoint of step {event.step} could not be kept, and another is tried",
                detail={"why": event.why, "in_a_row": self.in_a_row, "again_s": pause_s},
            )

    def publish_again(self, now_s: float) -> Iterator[Publish]:
        """What could not be published, where it is time to try that once more."""
        step, again_s = self._failed, self._again_s
        if step is not None and not self.damaged and again_s is not None and now_s >= again_s:
            self._failed = self._again_s = None
            yield Publish(step=step, parts=self.publishing[step])

    def published(self, step: int, now_s: float) -> None:
        """The checkpoint of `step` may be restored from."""
        del self.publishing[step]
        self.last_published = max(step, self.last_published or 0)
        self.in_a_row, self._counts_s, self._again_s = 0, 0.0, None
        self._saved_s, self._under_way = now_s, False

    def drop(self, now_s: float) -> None:
        """Forget those of which a part is missing: who was to write one is gone, or meets anew."""
        self._forget(list(self._divided))
        if self.in_a_row and self._again_s is None:
            self._again_s = now_s
        self._under_way = False

    def drop_before(self, generation: int) -> None:
        """The same for those divided among older generations, and for parts still to come."""
        self._forget([step for step, g in self._divided.items() if g < generation])
        self._counts_from = generation
        self._under_way = False

    def go_back(self, step: int) -> None:
        """That of this step is whole, and newer ones are written again."""
        self._forget(list(self._divided))
        self._forget_failed()
        self._whole, self.damaged, self._under_way = step, False, False
        self.last_published = step or None

    def gather(self) -> None:
        """Members load it: who was to leave has."""
        self.save_asked = False

    def _forget(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._parts.pop(step, None)
            del self._divided[step]

    def _forget_failed(self) -> None:
        if self._failed is not None:
            del self.publishing[self._failed]
            self._failed = None

    # ---- for people

    def why_unsaved(self) -> str:
        """Why a run ends whose checkpoints cannot be kept; empty if all can."""
        failed, last = self._unkept, self.last_published
        if failed is None or not self.in_a_row:
            return ""
        times = f", {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
        good = "there is none before it"
        if last is not None:
            good = f"the last good one is that of step {last}"
        what = f"the checkpoint of step {failed.step} could not be kept{times}; {good}"
        hint = f"{failed.hint}; " if failed.hint else ""
        return f"{what}: {failed.why}\n\nhint: {hint}{self.resume_hint()}"

    def resume_hint(self) -> str:
        """How a run that fails goes on."""
        last = self.last_published
        if last is None:
            return "there is no checkpoint yet to resume from; checkpoint.every_steps keeps some"
        return f"--resume goes on from the last checkpoint, of step {last}"
