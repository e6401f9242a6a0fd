"""What control remembers of one job: four states, each changed in its own file alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.control.checkpoints import Checkpoints
from raycloud.control.data import Data
from raycloud.control.exchange import ExchangeCost
from raycloud.control.heartbeats import Heartbeats
from raycloud.control.membership import Membership
from raycloud.control.recovery import Recovery
from raycloud.control.shares import Resharing
from raycloud.control.sync import Sync
from raycloud.control.tables import Phase

if TYPE_CHECKING:
    from raycloud.control.settings import ControlSettings
    from raycloud.events import StopRequested


class JobState:
    """Everything that one job's control remembers.

    Attributes:
        membership: Who there is, and who computes as which generation.
        recovery: What befell them, and why the run fails if it does.
        data: How far they have come, and what is committed.
        checkpoints: What is kept of it.
        heartbeats: Who answers calls.
        resharing: Their shares, and how fast they are where shares follow that.
        sync: By which point updates travel.
        exchange: What it costs to exchange gradients.
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
        self.checkpoints = Checkpoints(
            saves=settings.saves,
            most_failed=settings.most_failed,
            last_published=settings.step or None,
        )
        self.heartbeats = Heartbeats(settings.late_s)
        self.resharing = Resharing(settings)
        self.sync = Sync(settings)
        self.exchange = ExchangeCost(exact=settings.exact, auto_period=settings.auto_period)
        self.phase = Phase.NEW
        self.now_s = 0.0
        self.stop_requests = 0
        self.stop_reason = ""
        self.told_that_none_joins = False

    def stop(self, event: StopRequested) -> None:
        """A stop is asked for, maybe once more."""
        self.stop_requests += 1
        self.stop_reason = self.stop_reason or event.reason

    def steps_left(self) -> int | None:
        """Steps to come, as far as data and job are known; None: it is not known."""
        settings, progress = self.settings, self.data.progress
        if progress is None or (settings.job_steps is None and settings.epochs is None):
            return None
        done = progress.committed_step
        if settings.job_steps is not None:
            return max(0, settings.job_steps - done)
        return progress.steps.until_epoch(settings.epochs or 1, progress.position_at(done))

    def tell_that_none_joins(self) -> bool:
        """A person is told that members do not join any more; False: that was told before."""
        known, self.told_that_none_joins = self.told_that_none_joins, True
        return not known

    def stands(self) -> tuple[object, ...]:
        """What of the job a word may change that each member says."""
        members, changed = self.membership, self.resharing.changed
        sent, count = members.outstanding, members.roster.count
        return self.phase, members.group, sent, count, members.met, changed
