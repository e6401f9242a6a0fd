"""What control remembers: the job's state and its members; changed by `machine` only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.commands import Meet
from raycloud.control.checkpoints import Checkpoints, Failing
from raycloud.control.membership import Away, Turns
from raycloud.control.tables import MemberState, Phase
from raycloud.errors import InternalError

if TYPE_CHECKING:
    from raycloud.control.checkpoints import Saving
    from raycloud.control.data import Progress
    from raycloud.control.heartbeats import Hearing
    from raycloud.control.membership import Member, Outstanding
    from raycloud.control.recovery import Recovery
    from raycloud.control.settings import ControlSettings
    from raycloud.control.shares import Resharing
    from raycloud.events import DataGrew, ExchangeBroken, MemberReady, StepNotFinite
    from raycloud.order import Skip


# Of a group, and those that follow: past which step so many of the first ranks are known to be.
_Past = tuple[tuple[int, ...], frozenset[int], int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What holds over all members, as long as none turns and the generation is the same."""

    at: int
    group: tuple[int, ...]
    within: frozenset[int]
    coming: tuple[int, ...]
    joining: Sequence[Member]
    gone: bool
    broken: bool


@dataclass(kw_only=True, slots=True)
class JobState:
    """Everything that one job's control remembers.

    Attributes:
        hearing: Who answers calls.
        group: Members of the present generation, in order of rank.
        shares: Their micro-batches per step.
        following: Those of them that had no state then, nor a share yet; caught up: `joined`.
        progress: None until the members have said how much data there is.
        data_samples: Samples of the newest data heard of; 0 before any.
        data_version: Its version.
        data_ahead: Data that has grown, of which members have not been told yet.
        stop_requests: How often a stop was asked for.
        halt_sent: The halt is outstanding or in force.
        halted: A member has applied it: the run ends before its last step.
        settled: Number of the last change that is over, in force or withdrawn.
        formed_as: The generation as which the present group met first.
        groups: By generation, for `group_of`: all that met and had the state.
        sound_from: Words of older generations do not count any more: they broke.
        met: It is known to have met.
        recovery: What befell members since the last step of all; None: nothing.
        broken: The first word of an exchange of the present group that broke; None: none did.
        broken_s: When it came.
        meetings: How often the present group has met since its last step.
        losing: How many generations in a row lost members, without a step between.
        unmet: How many meetings in a row did not come about.
        called_s: When members were last called to meet.
        capacity: How many members the machines hold, as far as is known.
        next_member: The number of the next member that is asked for.
        first: What the first of those that met first said of itself, and so of the data.
        misses: How many members in a row were lost before they had joined.
        ask_again_s: Not before is another one asked for.
        told_that_none_joins: A person knows that members do not join any more.
        save_asked: A checkpoint is to be made, since members leave that are needed.
        failing: Checkpoints that could not be kept since the last one that was.
        saving: When one is due; None where the job says itself.
        started_s: When the job was started.
        now_s: When control was last asked.
        error: Why the run fails.
        failed_s: When the first member told that it failed.
        blames: The error that its caller gets, by name, where no member has failed or is lost.
        ended: Whose process has ended when it was done: its work is kept, it does not meet again.
        turns: What has become of all members together.
        away: Who is lost, and may come back.
        skips: What steps took and did not count, and who has said so; until it is written down.
        not_finite: The first word of a step for which all are to go back; until they do.
        left_out: Steps that change nothing when they are computed again.
    """

    settings: ControlSettings
    hearing: Hearing
    phase: Phase = Phase.NEW
    members: dict[int, Member] = field(default_factory=dict)
    group: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    following: frozenset[int] = frozenset()
    generation: int = 0
    progress: Progress | None = None
    resharing: Resharing | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    outstanding: Outstanding | None = None
    changes: int = 0
    workers: tuple[int, int] = (1, 1)
    data_samples: int = 0
    data_version: int = 0
    data_ahead: DataGrew | None = None
    stop_requests: int = 0
    stop_reason: str = ""
    halt_sent: bool = False
    halted: bool = False
    settled: int = 0
    formed_as: int = 0
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sound_from: int = 0
    met: bool = False
    recovery: Recovery | None = None
    broken: ExchangeBroken | None = None
    broken_s: float = 0.0
    meetings: int = 1
    losing: int = 0
    unmet: int = 0
    called_s: float = 0.0
    capacity: int = 0
    next_member: int = 0
    first: MemberReady | None = None
    misses: int = 0
    ask_again_s: float = 0.0
    told_that_none_joins: bool = False
    save_asked: bool = False
    failing: Failing = field(default_factory=Failing)
    saving: Saving | None = None
    started_s: float = 0.0
    now_s: float = 0.0
    error: str = ""
    failed_s: float = 0.0
    blames: str = "JobError"
    ended: set[int] = field(default_factory=set)
    turns: Turns = field(default_factory=Turns)
    away: Away = field(default_factory=Away)
    skips: dict[Skip, set[int]] = field(default_factory=dict)
    not_finite: StepNotFinite | None = None
    left_out: set[int] = field(default_factory=set)
    _known: _Known | None = None
    _past: _Past = ((), frozenset(), 0, 0)

    def member(self, number: int) -> Member:
        """The member of this number.

        Raises:
            InternalError: There never was one.
        """
        found = self.members.get(number)
        if found is None:
            raise InternalError(f"there is no member {number}; known are {sorted(self.members)}")
        return found

    def stands(self) -> tuple[object, ...]:
        """What of the job a word may change that each member says."""
        turned = self.resharing is not None and self.resharing.changed
        return self.phase, self.group, self.outstanding, self.turns.count, self.met, turned

    def present(self) -> Sequence[Member]:
        """Members that are not gone, in order of number."""
        return [self.members[number] for number in self.turns.present]

    def joining(self) -> Sequence[Member]:
        """Those of them that are to join those that compute, and do not yet: see `spare`."""
        return self._now().joining if self.progress is not None else ()

    def any_follows(self) -> bool:
        """Whether one of the group is not known to have the state, and is about to take it."""
        return any(not self.members[number].joined for number in self.following)

    def any_gone(self) -> bool:
        """Whether a member of the present generation is gone."""
        return self._now().gone

    def any_missing(self) -> bool:
        """The same, or one of the generation to come."""
        return self._now().broken

    def any_done(self) -> bool:
        """Whether a member of the present generation has nothing left to do."""
        return self.turns.states[MemberState.DONE] > 0 and any(
            self.members[number].state is MemberState.DONE for number in self.group
        )

    def all_past(self, step: int) -> bool:
        """Whether all of the group that do not follow have committed `step`; steps only rise."""
        group, follow, at, ranks = self._past
        if group is not self.group or follow is not self.following or at != step:
            group, follow, ranks = self.group, self.following, 0
        while ranks < len(group) and (
            self.members[group[ranks]].step > step or group[ranks] in follow
        ):
            ranks += 1
        self._past = group, follow, step, ranks
        return ranks == len(group)

    def _now(self) -> _Known:
        """What holds over all members, looked up again where one has turned."""
        at, known = self.turns.count, self._known
        change = self.outstanding.change if self.outstanding is not None else None
        coming = change.members if isinstance(change, Meet) else ()
        same = known is not None and known.group is self.group
        if known is None or not same or known.coming is not coming or known.at != at:
            within = known.within if known is not None and same else frozenset(self.group)
            present, new = self.turns.present.keys(), self.turns.new
            gone = not within <= present
            known = self._known = _Known(
                at=at,
                group=self.group,
                within=within,
                coming=coming,
                joining=[self.members[n] for n in new if n not in within],
                gone=gone,
                broken=gone or not present >= set(coming),
            )
        return known

    def drop_checkpoints(self) -> None:
        """Forget those of which a part is missing: who was to write one is gone, or meets anew."""
        self.checkpoints.drop()
        self.failing.dropped(self.now_s)
        if self.saving is not None:
            self.saving.dropped()

    @property
    def staying(self) -> int:
        """How many members are not gone and are not going to be."""
        return len(self.turns.present) - len(self.turns.leaving)

    def left(self) -> list[int]:
        """Who is left of the group, by rank, and then of those that leave it just now."""
        sent, there = self.outstanding, list(self.group)
        if sent is not None and sent.in_force and isinstance(sent.change, Meet):
            stays = set(self.group)
            there += [number for number in sent.members if number not in stays]
        present, ended = self.turns.present, self.ended
        return [number for number in there if number in present and number not in ended]

    def here(self, number: int) -> bool:
        """Whether this member is not gone."""
        return number in self.turns.present

    def spare(self, number: int) -> bool:
        """Whether this member is to join those that compute, and does not yet."""
        new = self.progress is not None and not self.members[number].joined
        return new and number not in self.within()

    def within(self) -> Collection[int]:
        """The members of the present generation, in no order."""
        return self._now().within

    def is_to_follow(self, number: int) -> bool:
        """Whether this member follows without the state, or is about to."""
        change = self.outstanding.change if self.outstanding is not None else None
        coming = change.following if isinstance(change, Meet) else ()
        return not self.members[number].joined and (number in self.following or number in coming)

    def is_to_meet(self, number: int) -> bool:
        """Whether this member is one of the present generation, or of the one to come."""
        return number in self.within() or number in self._now().coming

    def group_of(self, generation: int) -> tuple[int, ...]:
        """Who divided what was written as `generation`, which may be newer than their meeting."""
        met = max((g for g in self.groups if g <= generation), default=self.formed_as)
        return self.groups.get(met, self.group)

    def in_group(self) -> list[Member]:
        """Members of the present generation, in order of rank."""
        return [self.members[number] for number in self.group]

    def holders(self) -> list[Member]:
        """Those of them that do not follow: a step counts that all of these have committed."""
        return [self.members[number] for number in self.holding()]

    def holding(self) -> tuple[int, ...]:
        """Their numbers."""
        group, follow = self.group, self.following
        return tuple(n for n in group if n not in follow) if follow else group

    def formed(self) -> Progress:
        """The progress, once a generation was told to form.

        Raises:
            InternalError: It was not.
        """
        if self.progress is None:
            raise InternalError(f"no generation was formed yet in phase {self.phase}")
        return self.progress
