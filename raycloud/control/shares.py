"""When the shares change while the job runs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from raycloud.events import Noticed
from raycloud.order import PARTS, deal
from raycloud.planner.expected import FITTED, ExpectedSpeed
from raycloud.planner.shares import (
    better_shares,
    dead_band,
    equal_shares,
    first_shares,
    fit_shares,
)
from raycloud.planner.speed import NO_LIMIT, Speed, Speeds

if TYPE_CHECKING:
    from raycloud.control.heartbeats import Behind
    from raycloud.control.member import Member
    from raycloud.control.settings import ControlSettings
    from raycloud.events import MemberReady, StepsCommitted
    from raycloud.planner.speed import Seconds

_FAR = 2.0  # times as long as known
_LOOKS = 2  # a gain must be seen this often in a row
_SOME_STEPS = 4  # of a round that tells of speed in rounds
_LONG_STEPS, _LONG_S = 8, 5.0  # that a report is of, if it is no odd moment's
_LARGE_GAIN = 0.1  # of a step's seconds
_FINE_GAIN = 0.02  # of a round's: those of many steps
_TRY_EVERY = 40.0  # times what a step takes more with a micro-batch for who was idle: it takes two
_TRY_S = 20.0
_SAYS = 8  # members, in a note
_IN_A_HURRY = 3  # steps of other shares, of which data was not made ahead
_WAITED = 0.05  # of its time, who waits for data
_BELIEVED_S, _MOST_BELIEVED_S = 120.0, 3600.0  # what was seen of a feed, in seconds of training
_LATE_PART = 0.6  # of a round: what can wait is decided then, by all that is known by now
_REDEAL_S = 2.0  # more than it takes to meet anew and to deal what is left of a round
_GREY_MOST = 256  # members, up to which each is followed by a grey Markov chain, too


def speed(ready: MemberReady) -> Speed:
    """What a member measured before it was ready."""
    return Speed(fixed_s=ready.fixed_s, micro_batch_s=ready.micro_batch_s)


class Resharing:
    """Shares as asked, or fitted: then it follows speeds, and says when others are worth a change.

    Speeds are what is expected of the next step, each by the forecast that errs least. By as much
    as that of the slowest errs a change must be worth more (see `planner.shares.dead_band`).

    A change must be worth it in two looks in a row, so that one odd moment moves no work; in one by
    reports of rounds, which are long. Two rounds in a row tell a small gain, too. Where a member's
    speed has a new level, which no odd moment makes, a large gain is taken at once.

    Who is left idle, since one micro-batch of it would hold all up, gets one now and then: so it is
    noticed that it has recovered. That costs a tenth of the time at most.

    Where a member has waited for data, what it can be fed counts, too (`Feeds`). And of a step the
    exchange is a part as well: what a change gains is held against both.

    Members that meet once in a round need not all end each of its steps at the same time: shares
    have sixteenths of micro-batches there, and some steps one more than others. A change must be
    worth as much as any, however much forecasts err: what they are held against is of many steps.

    Attributes:
        changed: Some speed has, for good, since the last look.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._fits = settings.shares == "auto"
        self._estimates: dict[int, ExpectedSpeed] = {}
        self._fixed_s, self._micro_batch_s = array("d"), array("d")  # as estimated, by member
        self._feeds = Feeds()
        self._looked_s, self._looked_step, self._worth = 0.0, settings.step, 0
        self._idle_s: dict[int, float] = {}  # since when, of who has no share
        self._tried: int | None = None  # who was idle, and is to be measured
        self._told: dict[int, str] = {}  # which forecast was said to be used, by member
        self.changed = self._long = False
        self._round_s, self._at_step, self._at_s = 0.0, -1, 0.0  # the last round's; since when
        self._in_rounds: set[int] = set()  # members whose last report was of rounds
        self._rests_s: dict[int, tuple[float, float]] = {}  # of rounds, by member that is late

    def know(self, ready: MemberReady) -> None:
        """Take in what a member that is new has measured before it was ready."""
        if self._fits and ready.member not in self._estimates:
            self._estimates[ready.member] = self._expected(speed(ready))
            self._note(ready.member, self._estimates[ready.member])

    def _expected(self, prior: Speed) -> ExpectedSpeed:
        return ExpectedSpeed(prior, grey=self._settings.max_workers <= _GREY_MOST)

    def speed_of(self, ready: MemberReady) -> Speed:
        """Of a member that has measured itself, as it is known now."""
        estimate = self._estimates.get(ready.member)
        return speed(ready) if estimate is None else estimate.speed

    def rename(self, before: int, member: int) -> None:
        """What is known of a member's speed is known of another: it is the same process."""
        if before in self._estimates:
            self._estimates[member] = self._estimates[before]
            if before in self._in_rounds:
                self._in_rounds.add(member)
            self._note(member, self._estimates[member])
            self._feeds.rename(before, member)

    def observe(self, report: StepsCommitted) -> None:
        """Take in a member's measured seconds."""
        steps = report.last_step - report.first_step
        self._rests_s.clear()  # a round is over for all at once
        if self._fits and steps > 0 and report.micro_batches > 0:
            if (report.member in self._in_rounds) != (report.period > 1):
                self._take_turn(report, steps)
            estimate = self._estimates[report.member]
            self.changed |= estimate.observe(report.micro_batches, steps, report.compute_s)
            self._note(report.member, estimate)
            self._feeds.observe(report)
            rounds = max(1.0, steps / report.period)
            self._round_s = report.wall_s / rounds if report.period > 1 else 0.0
            self._long = steps >= _LONG_STEPS and report.compute_s >= _LONG_S
            if report.member == self._tried:
                known_s = estimate.speed.seconds(report.micro_batches / steps)
                self._tried, slow = None, report.compute_s / steps > known_s / _FAR
                self.changed |= slow  # else it has to be seen a few times more

    def _take_turn(self, report: StepsCommitted, steps: int) -> None:
        """Rounds begin, or are over. In one no step has an exchange beside it: speed is another.

        The shorter ones that a run may begin with have its first steps, which are slow. Others are
        at least half as long as a period, unless something reads the state sooner.
        """
        if report.period > 1 and steps < min((report.period + 1) // 2, _SOME_STEPS):
            return
        self._in_rounds ^= {report.member}
        if report.period > 1 and report.compute_s > 0:
            before, share = self._estimates[report.member].speed, report.micro_batches / steps
            part = report.compute_s / steps / before.seconds(share)
            now = replace(
                before, fixed_s=before.fixed_s * part, micro_batch_s=before.micro_batch_s * part
            )
            self._estimates[report.member] = self._expected(now)

    def _parts_of(self, group: Sequence[int]) -> int:
        """Of a micro-batch, that shares may be in; whole ones where there is none for each."""
        enough = self._settings.micro_batches >= len(group)
        return PARTS if enough and self._in_rounds.issuperset(group) else 1

    def foresee(self, behind: Mapping[int, Behind]) -> None:
        """Take in who has said, in the midst of a share, that it takes far longer than usual.

        Args:
            behind: What, by member.
        """
        for member, (micro_batches, seconds, rest_s, usual_s) in behind.items():
            estimate = self._estimates.get(member)
            if estimate is None:
                continue
            self._rests_s[member] = rest_s, usual_s
            if seconds < _FAR * estimate.speed.seconds(micro_batches):
                continue  # it was foreseen, maybe just too late for this round
            steps = 1 + round(rest_s / seconds)
            self.changed |= estimate.observe(micro_batches * steps, steps, seconds * steps)
            self._note(member, estimate)

    def late_in_round(self, group: Sequence[int], shares: Sequence[float]) -> int | None:
        """The member that holds up a round, where its rest is done far sooner if all divide it.

        Others are taken to have as much left as they would have at their usual pace. None: nobody,
        or shares are as good as they get.
        """
        late = [
            (*self._rests_s[member], share, member)
            for member, share in zip(group, shares, strict=True)
            if self._rests_s.get(member, (0.0, 0.0))[0] > 0.0
        ]
        if not late:
            return None
        lost = sum(share * (1.0 - usual_s / rest_s) for rest_s, usual_s, share, _ in late)
        speed = 1.0 - lost / sum(shares)  # of all together, 1 as usual
        rest_s, usual_s, _, member = max(late)
        if rest_s - usual_s / speed <= _REDEAL_S:
            return None
        better = self._better(shares, self._speeds(group), _LARGE_GAIN, self._parts_of(group))
        return None if better is None else member

    def _note(self, member: int, estimate: ExpectedSpeed) -> None:
        """Its speed, where those of many are asked for at once."""
        while member >= len(self._fixed_s):
            self._fixed_s.append(0.0)
            self._micro_batch_s.append(0.0)
        self._fixed_s[member] = estimate.fixed_s
        self._micro_batch_s[member] = estimate.micro_batch_s

    def _asked(self, slots: Sequence[int]) -> tuple[int, ...]:
        """A list of shares keeps its proportions where workers lack; all others are equal."""
        settings = self._settings
        if not isinstance(settings.shares, str):
            asked = [settings.shares[slot] for slot in slots if slot < len(settings.shares)]
            if len(asked) == len(slots) and sum(asked) > 0:
                return deal(asked, settings.micro_batches)
        return equal_shares(len(slots), settings.micro_batches)

    def _speeds(self, group: Sequence[int]) -> Speeds:
        at = np.array(group, np.intp)
        fixed_s, micro_batch_s = np.array(self._fixed_s), np.array(self._micro_batch_s)
        return Speeds(
            fixed_s[at],
            micro_batch_s[at],
            np.full(len(group), NO_LIMIT, np.int64),
            feed_s=self._feeds.micro_batch_s(group),
            beside_s=self._feeds.beside_s(group),
        )

    def first(self, members: Sequence[Member]) -> tuple[int, ...]:
        """The shares to begin with, by rank.

        Fitted shares replace the equal split only if they are predicted to be worth it, because a
        probe of a few micro-batches is noisy.
        """
        if not self._fits:
            return self._asked([m.slot for m in members])
        speeds, gain = self._speeds([m.number for m in members]), self._settings.reshare_gain
        return first_shares(speeds, self._settings.micro_batches, gain=gain)

    def _better(
        self, shares: Sequence[float], speeds: Speeds, gain: float, parts: int
    ) -> tuple[float, ...] | None:
        """Shares in so many parts that shorten the step by the gain; finer ones are replaced."""
        every, now = self._settings.micro_batches * parts, [int(share * parts) for share in shares]
        better = better_shares(now, speeds.in_parts(parts), every, gain=gain, least=parts)
        return None if better is None else _of_parts(better, parts)

    def fit(self, members: Sequence[Member]) -> tuple[float, ...]:
        """The best shares of these members, by rank, as their speeds are known now.

        Everyone has something to compute, where there is enough: so it becomes known how fast a
        member is that measured itself while others kept its machine busy.
        """
        if not self._fits:
            return self._asked([m.slot for m in members])
        group = [m.number for m in members]
        speeds, parts = self._speeds(group), self._parts_of(group)
        every = self._settings.micro_batches * parts
        fitted = fit_shares(speeds.in_parts(parts), every, least=parts)
        shares = np.array(_of_parts(fitted, parts))
        for idle in np.flatnonzero(shares == 0):
            most = shares.argmax()
            if shares[most] > 1:
                shares[most] -= 1
                shares[idle] += 1
        return tuple(shares.tolist())

    def look(
        self, *, group: tuple[int, ...], shares: tuple[float, ...], step: int, now_s: float
    ) -> tuple[float, ...] | None:
        """The shares to change to now, if it is time to look and the gain has lasted."""
        changed, self.changed = self.changed, False
        settings = self._settings
        if step != self._at_step:
            self._at_step, self._at_s = step, now_s
        due = (
            now_s - self._looked_s >= settings.reshare_every_s
            and step - self._looked_step >= settings.reshare_steps
            and now_s - self._at_s >= _LATE_PART * self._round_s
        )
        if not (self._fits and (changed or due)):
            return None
        speeds, parts = self._speeds(group), self._parts_of(group)
        if (tried := self._try(group, shares, speeds, now_s)) is not None:
            self.wait(step, now_s)
            return tried
        if changed:
            gain = max(settings.reshare_gain, _LARGE_GAIN)
            better = self._better(shares, speeds, gain, parts)
            if better is not None:
                self.wait(step, now_s)
                return better
        if not due:
            return None
        self.wait(step, now_s, worth=self._worth)
        slowest = self._estimates[group[speeds.seconds(np.array(shares)).argmax()]]
        gain, sure = settings.reshare_gain, self._long
        if parts == 1:
            gain = dead_band(gain, slowest.error)
        if (parts > 1) != any(share % 1 for share in shares):  # what is gained comes of the parts
            gain, sure = 0.0, True
        better = self._better(shares, speeds, gain, parts)
        if better is None and parts > 1:
            better, sure = self._better(shares, speeds, _FINE_GAIN, parts), False
        self._worth = 0 if better is None else self._worth + (_LOOKS if sure else 1)
        return better if self._worth >= _LOOKS else None

    def _try(
        self, group: tuple[int, ...], shares: tuple[float, ...], speeds: Speeds, now_s: float
    ) -> tuple[float, ...] | None:
        """Shares with a micro-batch for one that has been idle for long enough."""
        if 0 not in shares or max(shares) <= 1:
            self._idle_s.clear()
            return None
        idle = [at for at, share in enumerate(shares) if not share]
        self._idle_s = {group[at]: self._idle_s.get(group[at], now_s) for at in idle}
        dealt, given = np.array(shares), np.ones(len(shares), np.int64)
        more_s = speeds.seconds(given) - speeds.step_s(dealt)
        at = max(idle, key=lambda i: now_s - self._idle_s[group[i]] - _TRY_EVERY * more_s[i])
        least_s = max(_TRY_EVERY * more_s[at], _TRY_S)
        if now_s - self._idle_s[group[at]] < least_s:
            return None
        dealt[dealt.argmax()] -= 1
        dealt[at] = 1
        self._tried = group[at]
        self._feeds.forget(group[at])
        del self._idle_s[group[at]]
        return tuple(dealt.tolist())

    def slow_feeds(self, group: Sequence[int]) -> Noticed | None:
        """Whose data limits shares, where that was not said; None: nothing new."""
        return self._feeds.said(group)

    def forecasts(self, group: Sequence[int]) -> Noticed | None:
        """Which forecasts shares follow, where that was not said; None: nothing new."""
        known = [(n, self._estimates[n]) for n in group if n in self._estimates]
        using = {number: estimate.using for number, estimate in known}
        if using == {n: self._told.get(n, FITTED) for n in using}:
            return None
        changed = [(n, e) for n, e in known if e.using != self._told.get(n, FITTED)]
        self._told |= using
        return Noticed(
            what="shares follow the forecast of a member's speed that has erred least",
            detail={
                f"member {n}": f"{e.using}, {e.error:.1%} off, the fit {e.errors[FITTED]:.1%}"
                for n, e in changed[:_SAYS]
            },
        )

    def wait(self, step: int, now_s: float, *, worth: int = 0) -> None:
        """Look again only after some time and steps; by default forget the gain seen so far."""
        self._rests_s.clear()
        self._looked_s, self._looked_step, self._worth = now_s, step, worth


@dataclass(slots=True)
class _Feed:
    """What a member has shown of how fast its data comes.

    Attributes:
        micro_batch_s: Seconds of a micro-batch; 0: it is not held to anything.
        believed_s: So long is that believed, in seconds of training.
        left_s: What is left of them.
        waited: It has waited in its last report.
    """

    micro_batch_s: float = 0.0
    believed_s: float = _BELIEVED_S / 2
    left_s: float = 0.0
    waited: bool = False


class Feeds:
    """How fast the data of members comes, and what of their steps is no computing, by reports.

    Who has waited for data in two reports in a row was fed all the time, so a step's seconds are
    those of its data. Steps whose data was to come before other shares were known do not tell: it
    is made in a hurry. What was learnt is forgotten after a while, so that it is tried again, and
    believed for twice as long where it is learnt once more.
    """

    def __init__(self) -> None:
        self._feeds: dict[int, _Feed] = {}
        self._beside_s: dict[int, tuple[int, float]] = {}  # of which generation, and seconds
        self._began: dict[int, tuple[int, int]] = {}  # generation, and its first step heard of
        self._told: set[int] = set()

    def observe(self, report: StepsCommitted) -> None:
        """Take in a member's seconds; it has computed something."""
        member, steps = report.member, report.last_step - report.first_step
        generation, began = self._began.get(member, (-1, 0))
        if generation != report.generation:
            began = report.first_step
            self._began[member] = report.generation, began
        if report.first_step < began + _IN_A_HURRY:
            return
        self._beside_s[member] = report.generation, report.exchange_s / steps
        if report.data_s > _WAITED * report.wall_s:
            self._wait(self._feeds.setdefault(member, _Feed()), report)
        elif (feed := self._feeds.get(member)) is not None:
            feed.waited, feed.left_s = False, feed.left_s - report.wall_s
            shown_s = report.wall_s / report.micro_batches
            feed.micro_batch_s = min(feed.micro_batch_s, shown_s) if feed.left_s > 0.0 else 0.0

    def _wait(self, feed: _Feed, report: StepsCommitted) -> None:
        if feed.waited:
            if not feed.micro_batch_s:
                feed.believed_s = min(2.0 * feed.believed_s, _MOST_BELIEVED_S)
            feed.micro_batch_s = report.wall_s / report.micro_batches
            feed.left_s = feed.believed_s
        feed.waited = True

    def forget(self, member: int) -> None:
        """It is tried again now, whatever is known of its data."""
        if member in self._feeds:
            self._feeds[member].micro_batch_s = 0.0

    def rename(self, before: int, member: int) -> None:
        """What is known of a member is known of another: it is the same process."""
        if before in self._feeds:
            self._feeds[member] = self._feeds.pop(before)

    def micro_batch_s(self, group: Sequence[int]) -> Seconds | None:
        """Of each of these members; None where none is held to any."""
        found = [self._feeds[m].micro_batch_s if m in self._feeds else 0.0 for m in group]
        return np.array(found) if any(found) else None

    def beside_s(self, group: Sequence[int]) -> float:
        """Of a step: what exchanging takes who waits for nobody; 0 where nobody has told.

        By what was told of the newest generation: who is idle in it tells nothing.
        """
        known = [self._beside_s[member] for member in group if member in self._beside_s]
        newest = max((generation for generation, _ in known), default=0)
        return min((s for generation, s in known if generation == newest), default=0.0)

    def said(self, group: Sequence[int]) -> Noticed | None:
        """Whose data limits shares, where that was not said; None: nothing new."""
        slow = {
            m: f.micro_batch_s for m, f in self._feeds.items() if f.micro_batch_s and m in group
        }
        if not (new := slow.keys() - self._told):
            return None
        self._told |= new
        return Noticed(
            what="shares follow how fast a member's data comes, too: it has waited for it",
            detail={f"member {m}": f"{slow[m]:.3g} s a micro-batch" for m in sorted(new)[:_SAYS]},
        )


def _of_parts(counts: Sequence[int], parts: int) -> tuple[float, ...]:
    """In micro-batches."""
    return tuple(n / parts if n % parts else n // parts for n in counts)
