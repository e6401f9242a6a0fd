"""Checkpoints: when one is made, which are under way, and which may be restored from.

What is remembered here changes here alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
class Saving:
    """Follows what checkpoints cost and how often members are lost.

    Attributes:
        began_s: When the run began.
        asks: We say when one is due; else the job does.
        losses: How many members were lost since.
    """

    began_s: float = 0.0
    asks: bool = True
    losses: int = 0
    _cost_s: float = 0.0
    _saved_s: float | None = None
    _before_s: float | None = None  # when the one before that was
    _under_way: bool = False

    def wrote(self, blocked_s: float, write_s: float) -> None:
        """A member has written its part: the slowest one counts, older ones less and less."""
        self._cost_s = max(blocked_s + write_s, 0.9 * self._cost_s)

    def asked(self, now_s: float) -> None:
        """A checkpoint was asked for: there is no other until it is published."""
        self._before_s, self._saved_s, self._under_way = self._saved_s, now_s, True

    def published(self, now_s: float) -> None:
        """One is complete."""
        self._saved_s, self._under_way = now_s, False

    def dropped(self) -> None:
        """Those that were under way never will be: members met anew."""
        if self._under_way:
            self._saved_s, self._under_way = self._before_s, False

    def due(self, now_s: float) -> bool:
        """Whether another one is worth it now."""
        if self._under_way or not self.asks:  # what is slow to write to would never be done
            return False
        since_s = self.began_s if self._saved_s is None else self._saved_s
        between_s = (_SELDOM_S + now_s - self.began_s) / (1 + self.losses)
        after_s = interval_s(self._cost_s or _COST_S, between_s)
        return now_s - since_s >= min(max(after_s, _LEAST_S), _MOST_S)


@dataclass(kw_only=True, slots=True)
class Failing:
    """Follows checkpoints that cannot be kept, and says when another one is tried.

    What fails before that is one incident: members and steps that fail alike count once.

    Attributes:
        in_a_row: How many incidents there were since a checkpoint was kept.
        step: Of the newest that failed.
        why: Its reason.
        hint: What would do.
    """

    in_a_row: int = 0
    step: int = 0
    why: str = ""
    hint: str = ""
    _counts_s: float = 0.0  # what fails before then is the same incident
    _again_s: float | None = None

    def failed(self, now_s: float, *, ends: bool) -> float | None:
        """One could not be kept.

        Args:
            now_s: When.
            ends: Nothing is left to do but this.

        Returns:
            After how many seconds another one is tried; None: that was said before.
        """
        if now_s < self._counts_s:
            return None
        longest_s = _AT_THE_END_S if ends else _LONGEST_S
        pause_s = min(_AGAIN_S * 2.0 ** min(self.in_a_row, 10), longest_s)
        self.in_a_row += 1
        self._counts_s = self._again_s = now_s + pause_s
        return pause_s

    def due(self, now_s: float) -> bool:
        """Whether another one is to be tried now."""
        return self._again_s is not None and now_s >= self._again_s

    @property
    def waits(self) -> bool:
        """Whether another one is to be tried later: no other is worth it before."""
        return self._again_s is not None

    def tried(self) -> None:
        """Another one was asked for."""
        self._again_s = None

    def dropped(self, now_s: float) -> None:
        """The one that was asked for will not be made: members met anew."""
        if self.in_a_row and self._again_s is None:
            self._again_s = now_s

    def kept(self) -> None:
        """One is published."""
        self.in_a_row, self._counts_s, self._again_s = 0, 0.0, None


@dataclass(kw_only=True, slots=True)
class Checkpoints:
    """When a checkpoint is made, which are under way, and which is the newest that is whole.

    Attributes:
        saving: When one is due.
        failing: Checkpoints that could not be kept since the last one that was.
        save_asked: One is to be made, since members leave that are needed.
        last_published: Step of the newest checkpoint that may be restored from; None before the
            first.
        damaged: The newest of which all parts were there cannot be published: they are not sound.
    """

    saving: Saving = field(default_factory=Saving)
    failing: Failing = field(default_factory=Failing)
    save_asked: bool = False
    last_published: int | None = None
    damaged: bool = False
    _parts: dict[int, dict[WorkerKey, Part]] = field(default_factory=dict)  # by step
    _divided: dict[int, int] = field(default_factory=dict)  # by step, among which generation
    _counts_from: int = 0  # parts of older generations do not
    _publishing: dict[int, dict[WorkerKey, Part]] = field(default_factory=dict)  # by step
    _failed: int | None = None  # the one of them that could not be published
    _whole: int = -1  # step of the newest of which all parts were there

    def begin(self, now_s: float, published: int | None, *, saves: bool) -> None:
        """The job starts, with this checkpoint as the newest; `saves`: we say when one is due."""
        self.last_published = published
        self.saving = Saving(began_s=now_s, asks=saves)

    # ---- when one is made

    def ask(self) -> None:
        """One is to be made as soon as a change can be sent."""
        self.save_asked = True

    def is_due(self, now_s: float) -> bool:
        """Whether one is to be asked for now."""
        if self.save_asked or self.failing.due(now_s):
            return True
        return not self.failing.waits and self.saving.due(now_s)

    def save(self, now_s: float) -> None:
        """Members are told to write one."""
        self.save_asked = False
        self.failing.tried()
        self.saving.asked(now_s)

    def note_loss(self) -> None:
        """A member that computed is lost."""
        self.saving.losses += 1

    # ---- what becomes of it

    def collecting(self, generation: int) -> tuple[int, ...]:
        """Steps of checkpoints of which a part is missing, divided among this one or newer ones."""
        return tuple(sorted(step for step, g in self._divided.items() if g >= generation))

    @property
    def publishing(self) -> tuple[int, ...]:
        """Steps of checkpoints that are complete and not yet published."""
        return tuple(sorted(self._publishing))

    def missing(self, step: int, keys: Mapping[int, WorkerKey]) -> tuple[int, ...]:
        """The members, of these with their keys, whose part of `step` is missing."""
        parts = self._parts.get(step, {})
        return tuple(member for member, key in keys.items() if key not in parts)

    def take_in(self, event: PartWritten, keys: Mapping[int, WorkerKey]) -> Publish | None:
        """A member has written its part; to publish if it was the last one of these."""
        self.saving.wrote(event.blocked_s, event.write_s)
        key = event.replica, event.position
        if event.replica < 0:  # it is not told
            key = keys.get(event.member, key)
        parts = self.add(event.step, key, event.part, keys.values(), event.generation)
        return None if parts is None else Publish(step=event.step, parts=parts)

    def add(
        self,
        step: int,
        key: WorkerKey,
        part: Part,
        keys: Collection[WorkerKey],
        generation: int = 0,
    ) -> dict[WorkerKey, Part] | None:
        """Take in a part; all parts, by replica and position, if it was the last one.

        Members that meet anew write the checkpoint before their first step again: without effect
        where all of its parts were there before.

        Args:
            step: Of the checkpoint.
            key: Whose part it is; maybe of a generation that is not known to be in force yet.
            part: What it has written.
            keys: Of the members among whom the checkpoint is divided, as far as is known, by rank.
            generation: As which they met.
        """
        if step <= self._whole or generation < self._counts_from:
            return None
        if not self._divides(step, generation):
            return None
        parts = self._parts.setdefault(step, {})
        parts[key] = part
        if len(parts) < len(keys) or any(known not in parts for known in keys):
            return None
        for older in [at for at in self._divided if at <= step]:  # each writes in order
            self._parts.pop(older, None)
            del self._divided[older]
        self._forget_failed()
        self._publishing[step] = {known: parts[known] for known in keys}
        self._whole, self.damaged = step, False
        return self._publishing[step]

    def lack(self, event: PartFailed, now_s: float, *, ends: bool, most: int) -> Noticed | None:
        """A member could not write its part; it may still come, if that is waited for."""
        if event.step <= self._whole or event.generation < self._counts_from:
            return None
        if not self._divides(event.step, event.generation):
            return None
        return self._not_kept(event, now_s, ends=ends, most=most)

    def fail(
        self, event: CheckpointFailed, now_s: float, *, ends: bool, most: int
    ) -> Noticed | None:
        """It could not be published; it is to be published again, if no newer one is there."""
        if event.step == self._whole:
            self._failed, self.damaged = event.step, event.damaged
        else:
            del self._publishing[event.step]
        return self._not_kept(event, now_s, ends=ends, most=most)

    def _divides(self, step: int, generation: int) -> bool:
        """Whether what this generation writes counts: not where a newer one has divided it anew."""
        known = self._divided.get(step, generation)
        if generation > known:
            self._parts.pop(step, None)
        self._divided[step] = max(known, generation)
        return generation >= known

    def _not_kept(
        self, event: PartFailed | CheckpointFailed, now_s: float, *, ends: bool, most: int
    ) -> Noticed | None:
        """Training goes on without this checkpoint, and another one is tried."""
        failing = self.failing
        failing.step, failing.why, failing.hint = event.step, event.why, event.hint
        self.saving.dropped()
        pause_s = failing.failed(now_s, ends=ends)
        if pause_s is None or failing.in_a_row >= most:
            return None
        return Noticed(
            what=f"the checkpoint of step {event.step} could not be kept, and another is tried",
            detail={"why": event.why, "in_a_row": failing.in_a_row, "again_s": pause_s},
        )

    def publish_again(self, now_s: float) -> Publish | None:
        """What could not be published, where it is time to try that once more."""
        step = self._failed
        if step is None or self.damaged or not self.failing.due(now_s):
            return None
        self._failed = None
        self.failing.tried()
        return Publish(step=step, parts=self._publishing[step])

    def published(self, step: int, now_s: float) -> None:
        """The checkpoint of `step` may be restored from."""
        del self._publishing[step]
        self.last_published = max(step, self.last_published or 0)
        self.failing.kept()
        self.saving.published(now_s)

    def drop(self, now_s: float) -> None:
        """Forget those of which a part is missing: who was to write one is gone, or meets anew."""
        self._parts.clear()
        self._divided.clear()
        self.failing.dropped(now_s)
        self.saving.dropped()

    def drop_before(self, generation: int) -> None:
        """The same for those divided among older generations, and for parts still to come."""
        for step in [step for step, g in self._divided.items() if g < generation]:
            self._parts.pop(step, None)
            del self._divided[step]
        self._counts_from = generation
        self.saving.dropped()

    def go_back(self, step: int) -> None:
        """That of this step is whole, and newer ones are written again."""
        self._parts.clear()
        self._divided.clear()
        self._forget_failed()
        self.damaged = False
        self._whole = step
        self.last_published = step or None
        self.saving.dropped()

    def gather(self) -> None:
        """Members load it: who was to leave has."""
        self.save_asked = False

    def _forget_failed(self) -> None:
        if self._failed is not None:
            del self._publishing[self._failed]
            self._failed = None

    # ---- for people

    def why_unsaved(self) -> str:
        """Why a run ends whose checkpoints cannot be kept."""
        failing, last = self.failing, self.last_published
        times = f", {failing.in_a_row} times in a row" if failing.in_a_row > 1 else ""
        good = (
            "there is none before it"
            if last is None
            else f"the last good one is that of step {last}"
        )
        what = f"the checkpoint of step {failing.step} could not be kept{times}; {good}"
        resume = self.resume_hint()
        hint = f"{failing.hint}; {resume}" if failing.hint else resume
        return f"{what}: {failing.why}\n\nhint: {hint}"

    def resume_hint(self) -> str:
        """How a run that fails goes on."""
        last = self.last_published
        if last is None:
            return "there is no checkpoint yet to resume from; checkpoint.every_steps keeps some"
        return f"--resume goes on from the last checkpoint, of step {last}"
