"""One member, as control knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.control.tables import GONE, MemberState
from raycloud.control.turns import Turns

if TYPE_CHECKING:
    from raycloud.events import MemberReady


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """A member that had left the group, which has maybe gone on since, is called to meet it again.

    Attributes:
        generation: As which.
        step: One past the last step that was committed then.
    """

    generation: int
    step: int


@dataclass(kw_only=True, slots=True)
class Member:
    """One member, from the moment it was asked for.

    Attributes:
        since_s: When it entered its state.
        heard_s: When it was last heard, or was last told to begin something.
        step: One past the last step it has reported as committed.
        generation: The generation of its last report.
        part_step: The step of the last checkpoint part it wrote; -1 before the first.
        slot: Which of the job's places for workers it has, from 0.
        placed: There is a place on a machine for it.
        joined: It is known to compute, and has the state of the training.
        recalls: When it was called back, as long as it has said nothing as that generation, or as
            a newer one; what it says of the time before may come later.
        leaving: It is going to be gone: the job gets along without it as soon as it can.
        pace_s: Seconds that a byte takes from it to others, at most; infinite before it is known.
        turns: Those of its job.
    """

    number: int
    state: MemberState
    since_s: float
    heard_s: float
    node: str = ""
    ready: MemberReady | None = None
    step: int = 0
    generation: int = 0
    part_step: int = -1
    slot: int = 0
    placed: bool = True
    joined: bool = True
    recalls: tuple[Recall, ...] = ()
    leaving: bool = False
    pace_s: float = float("inf")
    turns: Turns = field(default_factory=Turns, compare=False, repr=False)

    def __post_init__(self) -> None:
        """It is counted."""
        self.turns.come(self.number, self.state, self.heard_s, joined=self.joined)

    @property
    def gone(self) -> bool:
        """Nothing that it says counts any more."""
        return self.state in GONE

    def enter(self, state: MemberState, now_s: float) -> None:
        """It is in `state` from now on."""
        if self.state is state:
            return
        self.turns.move(self.state, state)
        if state in GONE and not self.gone:
            self.turns.go(self.number)
        self.state, self.since_s = state, now_s

    def leave(self) -> None:
        """It is going to be gone."""
        self.leaving = True
        self.turns.leaving.add(self.number)

    def join(self, step: int) -> None:
        """It computes from `step` on."""
        self.joined, self.step = True, step
        self.turns.join(self.number)

    def recall(self, generation: int, step: int) -> None:
        """It is called to meet the others as `generation`; they have committed up to `step`."""
        self.recalls = (*self.recalls, Recall(generation=generation, step=step))

    def goes_on(self, step: int, generation: int) -> bool:
        """Whether it may have nothing to say of steps before `step`, as one of `generation`.

        Where it met others again it has from them what they took since.
        """
        return step == self.step or any(
            generation >= one.generation and step >= one.step for one in self.recalls
        )

    def come_to(self, step: int, generation: int) -> None:
        """It has committed up to `step`, the last of it as one of `generation`."""
        self.step = step
        if self.recalls:
            self.recalls = tuple(one for one in self.recalls if one.generation > generation)

    def part(self) -> None:
        """What it has is not to be gone on from: it is as one that is new."""
        self.joined = False
        self.turns.part(self.number)

    def __str__(self) -> str:
        """As people read it."""
        return f"member {self.number}" + (f" on {self.node}" if self.node else "")
