"""One member as control knows it, and the counts of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from raycloud.control.tables import GONE, MemberState

if TYPE_CHECKING:
    from raycloud.events import MemberReady

_ENDING: Final = frozenset({MemberState.DRAINING, MemberState.DONE})
_FORGETS: Final = 1.25  # with each report: what was the best pace once need not hold any more


@dataclass(kw_only=True, slots=True)
class Roster:
    """Counts of a job's members, kept by the members, so that not all are looked at each time.

    Attributes:
        count: How often one has come, joined or gone: what was looked up before that is old.
        states: How many are in each state.
        present: The numbers of those that are not gone, in order.
        new: Those of them that have not joined.
        leaving: Those of them that are going to leave.
        heard_s: All of them were heard last then, or later.
    """

    count: int = 0
    states: dict[MemberState, int] = field(default_factory=lambda: dict.fromkeys(MemberState, 0))
    present: dict[int, None] = field(default_factory=dict)
    new: dict[int, None] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    heard_s: float = float("inf")


@dataclass(kw_only=True, slots=True)
class Member:
    """One member, from the moment it was asked for.

    Attributes:
        role: What it is: a worker.
        heard_s: When it was last heard, or was last told to begin something.
        roster: Of its job.
        since_s: When it was heard so that it entered its state.
        step: One past the last step it has reported as committed.
        generation: The generation of its last report.
        part_step: The step of the last checkpoint part it wrote; -1 before the first.
        slot: Which of the job's places for workers it has, from 0.
        placed: There is a place on a machine for it.
        joined: It is known to compute, and has the state of the training.
        recalls: Each time that it had left and was called to meet the others again: as which
            generation, and one past the last step that was committed then. It has maybe gone on
            since. Forgotten once it has said something as that generation, or as a newer one; what
            it says of the time before may come later.
        leaving: It is going to be gone: the job gets along without it as soon as it can.
        pace_s: Seconds that a byte takes from it to others, at most; infinite before it is known.
    """

    number: int
    role: str
    heard_s: float
    roster: Roster = field(compare=False, repr=False)
    state: MemberState = MemberState.SPAWNING
    since_s: float = 0.0
    node: str = ""
    ready: MemberReady | None = None
    step: int = 0
    generation: int = 0
    part_step: int = -1
    slot: int = 0
    placed: bool = True
    joined: bool = True
    recalls: tuple[tuple[int, int], ...] = ()
    leaving: bool = False
    pace_s: float = float("inf")

    def __post_init__(self) -> None:
        """It is counted."""
        roster = self.roster
        roster.count += 1
        roster.states[self.state] += 1
        roster.present[self.number] = None
        roster.heard_s = min(roster.heard_s, self.heard_s)
        if not self.joined:
            roster.new[self.number] = None

    @property
    def gone(self) -> bool:
        """Nothing that it says counts any more."""
        return self.state in GONE

    def enter(self, state: MemberState) -> None:
        """It is in `state` from now on."""
        if self.state is state:
            return
        roster = self.roster
        roster.states[self.state] -= 1
        roster.states[state] += 1
        if state in GONE and not self.gone:
            roster.count += 1
            roster.leaving.discard(self.number)
            roster.present.pop(self.number, None)
            roster.new.pop(self.number, None)
        self.state, self.since_s = state, self.heard_s

    def hear(self, now_s: float) -> None:
        """It was heard, or is told to begin something: it has its time again."""
        self.heard_s = now_s

    def place(self, node: str) -> None:
        """There is a place for it."""
        self.node, self.placed = node, True

    def introduce(self, ready: MemberReady) -> None:
        """It is ready, and has measured itself."""
        self.ready, self.node = ready, ready.node or self.node

    def leave(self) -> None:
        """It is going to be gone."""
        self.leaving = True
        self.roster.leaving.add(self.number)

    def join(self, step: int) -> None:
        """It computes from `step` on."""
        self.joined, self.step = True, step
        self.roster.count += 1
        self.roster.new.pop(self.number, None)

    def forget_state(self) -> None:
        """What it has is not to be gone on from: it is as one that is new."""
        self.joined = False
        self.roster.count += 1
        self.roster.new[self.number] = None

    def begin(self, step: int, generation: int, now_s: float) -> None:
        """It is told to compute from `step` on, as one of `generation`."""
        self.join(step)
        self.generation, self.heard_s, self.part_step = generation, now_s, -1

    def meet_again(self, now_s: float) -> None:
        """It is told to meet the others: what it was about to end, or has written, is void."""
        self.heard_s, self.part_step = now_s, -1
        if self.state in _ENDING:
            self.enter(MemberState.ACTIVE)

    def recall(self, generation: int, step: int) -> None:
        """It is called to meet the others as `generation`; they have committed up to `step`."""
        self.recalls = (*self.recalls, (generation, step))

    def goes_on(self, step: int, generation: int) -> bool:
        """Whether it may have nothing to say of steps before `step`, as one of `generation`.

        Where it met others again it has from them what they took since.
        """
        return step == self.step or any(generation >= g and step >= at for g, at in self.recalls)

    def come_to(self, step: int, generation: int | None = None) -> None:
        """It has committed, or follows, up to `step`, the last of it as one of `generation`."""
        self.step = step
        if self.recalls and generation is not None:
            self.recalls = tuple(one for one in self.recalls if one[0] > generation)

    def report(self, step: int, generation: int) -> None:
        """It says so itself, in a report of that generation."""
        self.generation = generation
        self.come_to(step, generation)

    def write_part(self, step: int) -> None:
        """It has written its part of this checkpoint."""
        self.part_step = step

    def note_pace(self, second_per_byte: float) -> None:
        """Its last messages took so long: the least of the last few counts (see `scaling`)."""
        self.pace_s = min(second_per_byte, _FORGETS * self.pace_s)

    def __str__(self) -> str:
        """As people read it."""
        return f"member {self.number}" + (f" on {self.node}" if self.node else "")
