"""What control remembers of one job: four states, each changed in its own file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycloud.control.checkpoints import Checkpoints
from raycloud.control.data import Data
from raycloud.control.heartbeats import Heartbeats
from raycloud.control.membership import Membership
from raycloud.control.recovery import Recovery
from raycloud.control.shares import Resharing
from raycloud.control.tables import Phase

if TYPE_CHECKING:
    from raycloud.control.settings import ControlSettings
    from raycloud.events import MemberReady, StopRequested


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Members that have outlived their driver, and what the run's files say of them.

    Attributes:
        readies: What they said when they could compute, by rank.
        steps: One past the last step that each has reported, by member, as far as the log has it;
            also of those that are gone.
        skips: What each has reported that did not count, as records, by member.
        lost: Members of their generation that are not there any more.
        changes: The highest number of a change that was sent to any of them.
        published: Step of the newest checkpoint; None where there is none.
        began_s: When what drives them now was started.
    """

    readies: tuple[MemberReady, ...]
    steps: dict[int, int]
    skips: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    changes: int = 0
    published: int | None = None
    began_s: float = 0.0


class JobState:
    """Everything that one job's control remembers.

    Attributes:
        membership: Who there is, and who computes as which generation.
        recovery: What befell them, and why the run fails if it does.
        data: How far they have come, and what is committed.
        checkpoints: What is kept of it.
        heartbeats: Who answers calls.
        resharing: How fast members are; None where shares do not follow that.
        phase: Where the job stands.
        now_s: When control was last asked.
        stop_requests: How often a stop was asked for.
        stop_reason: Why, the first time.
        told_that_none_joins: A person knows that members do not join any more.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.membership = Membership(
            workers=(settings.min_workers, settings.max_workers),
            capacity=settings.capacity,
            generation=settings.first_generation,
            next_member=settings.first_member,
        )
        self.recovery = Recovery()
        self.data = Data()
        self.checkpoints = Checkpoints(last_published=settings.step or None)
        self.heartbeats = Heartbeats(settings.late_s)
        self.resharing: Resharing | None = None
        self.phase = Phase.NEW
        self.now_s = 0.0
        self.stop_requests = 0
        self.stop_reason = ""
        self.told_that_none_joins = False

    def stop(self, event: StopRequested) -> None:
        """A stop is asked for, maybe once more."""
        self.stop_requests += 1
        self.stop_reason = self.stop_reason or event.reason

    def tell_that_none_joins(self) -> bool:
        """A person is told that members do not join any more; False: that was told before."""
        known, self.told_that_none_joins = self.told_that_none_joins, True
        return not known

    def know_speed(self, ready: MemberReady, now_s: float) -> None:
        """What a member has measured before it is ready, where shares follow speed."""
        if self.settings.shares == "auto":
            if self.resharing is None:
                self.resharing = Resharing(self.settings, now_s)
            self.resharing.know(ready)

    def wait_with_shares(self, step: int, now_s: float) -> None:
        """Members meet, or have other shares: these are looked at again after a while."""
        if self.resharing is not None:
            self.resharing.wait(step, now_s)

    def stands(self) -> tuple[object, ...]:
        """What of the job a word may change that each member says."""
        members = self.membership
        changed = self.resharing is not None and self.resharing.changed
        change, count = members.outstanding, members.roster.count
        return self.phase, members.group, change, count, members.met, changed
