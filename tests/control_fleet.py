"""A small simulated fleet under control.

The fleet runs in virtual time: members of random speeds move in lockstep, report now and then, and
their words are delayed at random, in order per member. They die, freeze, fail, and are stopped.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, ControlSettings
from raycloud.order import ledger_line
from tests.control_events import committed, part, published, ready, stop

LEAD = 3  # steps between the last member's holding a change and its taking effect
LIMIT_S = 5_000.0
REPORT_S = 0.4


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
    stops_s: tuple[float, ...] = ()
    dies_s: float | None = None
    freezes_s: float | None = None
    fails_s: float | None = None
    never_ready: bool = False


@dataclass
class Body:
    """One simulated member."""

    outbox_s: float = 0.0  # its last word arrives then
    reported: int = 0
    micro_batches: int = 0
    compute_s: float = 0.0
    flushed_s: float = 0.0
    generation: int = 0
    mute: bool = False
    holds: set[int] = field(default_factory=set)


class Fleet:
    """Carries out commands, and feeds what happens back, in virtual time."""

    def __init__(self, scene):
        self.scene = scene
        self.job = Control(scene.settings)
        self.random = random.Random(scene.seed)
        self.now_s, self.count = 0.0, 0
        self.queue, self.bodies = [], {}
        self.group, self.shares, self.step, self.running = (), (), scene.settings.step, False
        self.generation = scene.settings.first_generation
        self.changes = deque()  # [number, change, step at which it takes effect or None]
        self.end = scene.steps
        self.log, self.commands, self.lines = [], [], []
        self.published, self.manifests = None, {}
        self.in_flight = 0

    # ---- the world

    def at(self, seconds, act):
        self.count += 1
        heapq.heappush(self.queue, (seconds, self.count, act))

    def some_s(self):
        return self.random.uniform(0, self.scene.delay_s)

    def say(self, member, event, after_s=0.0):
        """A member's word: delayed, and never before an earlier word of the same member."""
        body = self.bodies[member]
        if not body.mute:
            body.outbox_s = max(body.outbox_s, self.now_s + after_s + self.some_s())
            self.at(body.outbox_s, lambda: self.feed(event))

    def feed(self, event):
        self.carry_out(self.job.on(event, self.now_s), event)

    def carry_out(self, commands, cause):
        self.log.append((cause, self.now_s, commands))
        for command in commands:
            self.commands.append(command)
            match command:
                case c.Spawn(members=members):
                    self.spawn(members)
                case c.Form():
                    self.form(command)
                case c.Prepare(number=number, members=members, change=change):
                    self.changes.append([number, change, None])
                    for m in members:
                        self.at(self.now_s + self.some_s(), lambda m=m: self.hold(m, number))
                case c.Publish(step=step):
                    self.manifests[step] = (self.job.position_at(step), self.job.ledger_at(step))
                    self.at(self.now_s + self.some_s(), lambda step=step: self.publish(step))
                case c.Record(records=records):
                    self.lines += [ledger_line(r) for r in records]
                case c.Release(members=members):
                    for m in members:
                        self.bodies[m].mute = True
                case c.Notice() | c.Finish():
                    pass

    def spawn(self, members):
        for i, m in enumerate(members):
            self.bodies[m] = Body(reported=self.step)
            self.say(m, e.MemberSpawned(member=m, node="n"))
            if not (self.scene.never_ready and i == 0):
                probed_s = self.speed(m) if self.scene.seed % 3 else 0.1  # a probe may mislead
                word = ready(m, samples=self.scene.samples, micro_batch_s=probed_s)
                self.say(m, word, after_s=1.0)

    def speed(self, member):
        turned = self.now_s > 6 and self.scene.seed % 2  # in odd worlds speeds change on the way
        place = member + (1 if turned else 0)
        return self.scene.speeds[place % len(self.scene.speeds)]

    def form(self, command):
        self.group, self.shares = command.members, command.shares
        assert command.step == self.step
        formed = e.GenerationFormed(
            generation=command.generation,
            members=command.members,
            shares=command.shares,
            first_step=command.step,
        )
        self.at(self.now_s + self.some_s(), lambda: self.feed(formed))
        self.at(self.now_s + self.some_s(), self.begin)

    def begin(self):
        self.running = True
        for m in self.group:
            self.bodies[m].flushed_s, self.bodies[m].generation = self.now_s, self.generation
        self.tread()

    def hold(self, member, number):
        self.bodies[member].holds.add(number)
        for entry in self.changes:
            if entry[0] == number and all(number in self.bodies[m].holds for m in self.group):
                entry[2] = self.step + LEAD

    def publish(self, step):
        self.published = step if self.published is None else max(step, self.published)
        self.feed(published(step))

    # ---- lockstep

    def tread(self):
        """Before a step: checkpoints and changes; then the step itself."""
        if any(self.bodies[m].mute for m in self.group):
            return  # the exchange does not end: the others wait, and have nothing to say
        while self.changes and self.changes[0][2] == self.step:
            self.apply(*self.changes.popleft()[:2])
        every, begun = self.scene.every, self.step > self.scene.settings.step
        if self.step >= self.end or (every and begun and self.step % every == 0):
            self.save()
        if self.step >= self.end:
            for m in self.group:
                self.say(m, e.MemberDone(member=m, step=self.step))
            return
        span = self.job_steps().span(0, self.job.position_at(self.step))
        fraction = span.samples / self.scene.settings.global_batch
        takes_s = 0.01
        for m, share in zip(self.group, self.shares, strict=True):
            spent_s = share * fraction * self.speed(m) * self.random.uniform(0.9, 1.1)
            self.bodies[m].compute_s += spent_s
            self.bodies[m].micro_batches += share
            takes_s = max(takes_s, spent_s)
        self.at(self.now_s + takes_s, self.commit)

    def commit(self):
        if any(self.bodies[m].mute for m in self.group):
            return
        self.step += 1
        for m in self.group:
            if self.now_s - self.bodies[m].flushed_s >= REPORT_S:
                self.flush(m)
        self.tread()

    def apply(self, number, change):
        for m in self.group:
            if self.random.random() < 0.5:
                self.flush(m)
            self.say(m, e.ChangeApplied(member=m, change=number, step=self.step))
        match change:
            case c.Reshare(generation=generation, shares=shares):
                self.generation, self.shares = generation, shares
            case c.Halt():
                self.end = self.step

    def flush(self, m):
        body = self.bodies[m]
        word = committed(
            m,
            body.reported,
            self.step,
            generation=self.generation,
            at=self.job.position_at(self.step),
            micro_batches=body.micro_batches,
            compute_s=body.compute_s,
        )
        self.say(m, word)
        body.reported, body.flushed_s = self.step, self.now_s
        body.micro_batches, body.compute_s = 0, 0.0

    def save(self):
        for m in self.group:
            self.flush(m)
            self.say(m, part(m, self.step), after_s=self.some_s())

    def job_steps(self):
        return self.scene.settings.steps(self.scene.samples)

    # ---- one run

    def fault(self, kind):
        if self.job.finished or not self.bodies:
            return
        member = self.random.choice(sorted(self.bodies))
        if kind == "fails":
            self.say(member, e.MemberFailed(member=member, error="TaskError", message="no"))
        elif kind == "dies":
            lost = e.MemberLost(member=member, reason="died")
            self.at(self.now_s + self.some_s(), lambda: self.feed(lost))
        self.bodies[member].mute = True

    def run(self):
        self.carry_out(self.job.start(0.0), None)
        for stop_s in self.scene.stops_s:
            self.at(stop_s, lambda: self.feed(stop()))
        for kind in ("dies", "freezes", "fails"):
            when_s = getattr(self.scene, f"{kind}_s")
            if when_s is not None:
                self.at(when_s, lambda kind=kind: self.fault(kind))
        self.at(1.0, self.tick)
        while self.queue and self.now_s < LIMIT_S:
            self.now_s, _, act = heapq.heappop(self.queue)
            act()
            self.check()
        assert self.job.finished, f"stuck in {self.job.phase} with {dict(self.job.members)}"
        return self

    def tick(self):
        self.carry_out(self.job.tick(self.now_s), "tick")
        if not self.job.finished:
            self.at(self.now_s + 1.0, self.tick)

    def check(self):
        job = self.job
        if job.ledger is None:
            return
        assert sum(job.shares) == self.scene.settings.micro_batches
        assert min(job.shares) >= 0
        assert len(job.shares) == len(job.group)
        assert job.committed_step <= max(self.step, self.scene.settings.step)
        assert job.ledger.audit().exact
        assert job.ledger.next_step == job.committed_step

    def finish(self):
        return self.commands[-1]
