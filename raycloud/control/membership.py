"""What has become of a job's members together, so that not all are looked at each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.control.tables import GONE, MemberState

if TYPE_CHECKING:
    from raycloud.commands import Change
    from raycloud.events import MemberReady


@dataclass(kw_only=True, slots=True)
class Turns:
    """Counts what becomes of members; they say so themselves.

    Attributes:
        count: How often one has come, joined or gone: what is known of who is there is old.
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

    def come(self, number: int, state: MemberState, heard_s: float, *, joined: bool) -> None:
        """A member is asked for."""
        self.count += 1
        self.states[state] += 1
        self.present[number] = None
        self.heard_s = min(self.heard_s, heard_s)
        if not joined:
            self.new[number] = None

    def join(self, number: int) -> None:
        """It computes."""
        self.count += 1
        self.new.pop(number, None)

    def part(self, number: int) -> None:
        """It has no state any more that counts."""
        self.count += 1
        self.new[number] = None

    def move(self, before: MemberState, after: MemberState) -> None:
        """One is in another state."""
        self.states[before] -= 1
        self.states[after] += 1

    def go(self, number: int) -> None:
        """It is gone."""
        self.count += 1
        self.leaving.discard(number)
        self.present.pop(number, None)
        self.new.pop(number, None)


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


@dataclass(kw_only=True, slots=True)
class Away:
    """Whose process and place are kept although others go on without it.

    Attributes:
        since_s: By member that is away: since when.
        returns: By member that is what a process has come back as: how often it has come back.
        vacant: Who was lost since the last tick by its end, so that its place may be another's.
    """

    since_s: dict[int, float] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    vacant: list[int] = field(default_factory=list)

    def __contains__(self, number: int) -> bool:
        """Whether this member is away."""
        return number in self.since_s


@dataclass(kw_only=True, slots=True)
class Outstanding:
    """A change that was sent ahead and is not yet in force everywhere.

    Attributes:
        applied: The members that switched, with the step at whose start they did: the same.
        in_force: Somebody has, or computes already as it says: so will all others.
    """

    number: int
    members: tuple[int, ...]
    change: Change
    applied: dict[int, int] = field(default_factory=dict)
    in_force: bool = False
    _of: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())  # these members, in no order

    @property
    def everywhere(self) -> bool:
        """Every member has switched."""
        return len(self.applied) >= len(self.members) and self.applied.keys() >= self._within()

    def concerns(self, number: int) -> bool:
        """It was sent to this member."""
        return number in self._within()

    def _within(self) -> frozenset[int]:
        if self._of[0] is not self.members:
            self._of = self.members, frozenset(self.members)
        return self._of[1]
