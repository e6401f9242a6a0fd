"""A small simulated fleet under control.

The fleet runs in virtual time: members of random speeds move in lockstep, report now and then, and
their words are delayed at random, in order per member. They die, freeze, fail, join and are
stopped, their exchange breaks, and what they train on grows; those that are left meet and go on.
Which samples they take is counted here by the definition, not by `Steps`, so that control is held
against it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Control, Phase
from raycloud.control.heartbeats import Heard
from raycloud.order import ledger_line
from tests.control_events import committed, part, published, ready, stop
from tests.control_following import Following
from tests.control_restoring import Restoring
from tests.control_scene import Body, Samples
from tests.control_troubles import Troubles

LEAD = 3  # steps between the last member's holding a change and its taking effect
LIMIT_S = 5_000.0
PATIENCE_S = 2_000.0  # so long may a job wait for machines; then a person stops it
REPORT_S = 0.4


class Fleet(Samples, Following, Restoring, Troubles):
    """Carries out commands, and feeds what happens back, in virtual time."""

    def __init__(self, scene):
        self.scene = scene
        self.job = Control(scene.settings)
        self.random = random.Random(scene.seed)
        self.now_s, self.count = 0.0, 0
        self.queue, self.bodies = [], {}
        self.group, self.shares, self.step, self.running = (), (), scene.settings.step, False
        self.following = ()  # those of the group that write nothing
        self.broken = False  # the exchange, until they meet anew
        self.clumsy = scene.clumsy
        self.nearby = self.random.randrange(2)  # state is taken at once, not followed for
        self.generation = scene.settings.first_generation
        self.formed_as, self.groups, self.divided = self.generation, [], set()
        self.samples, self.version = scene.samples, 0  # of the data there is, taken up or not
        self.sizes = dict(scene.sizes) or {0: scene.samples}  # samples by first epoch
        self.extend(scene.settings.position, scene.samples)
        self.in_force = dict(self.sizes)
        self.position = self.settled(scene.settings.position)
        self.spans, self.saved = {}, {}
        self.changes = deque()  # [number, change, step at which it takes effect or None]
        self.end = scene.steps
        self.gave_up = False
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
                case c.Spawn(members=members, joins=joins):
                    self.spawn(members, joins)
                case c.Restore(newest=newest):
                    self.go_back(newest)
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
                case c.Release() | c.LeaveOut() | c.Readmit():
                    self.obey(command)
                case e.Noticed() | c.Finish():
                    pass

    def spawn(self, members, joins):
        for i, m in enumerate(members):
            self.bodies[m] = Body(reported=None if joins else self.step)
            self.say(m, e.MemberSpawned(member=m, node="n"))
            if joins and self.clumsy:
                self.clumsy -= 1
                self.say(m, e.MemberLost(member=m, reason="no memory"), after_s=1.0)
                self.bodies[m].mute = True
            elif not (self.scene.never_ready and i == 0):
                probed_s = self.speed(m) if self.scene.seed % 3 else 0.1  # a probe may mislead
                word = ready(m, samples=self.scene.samples, micro_batch_s=probed_s)
                waits = self.scene.seed % 5 == 0 and 0 < i == len(members) - 1 and not joins
                self.say(m, word, after_s=15.0 if waits else 1.0)  # others may begin without it

    def speed(self, member):
        turned = self.now_s > 6 and self.scene.seed % 2  # in odd worlds speeds change on the way
        place = member + (1 if turned else 0)
        return self.scene.speeds[place % len(self.scene.speeds)]

    def form(self, command):
        if not self.groups:
            for m in set(self.bodies) - set(command.members):
                self.bodies[m].reported = None
        self.meet(command)
        assert command.step <= self.step
        assert len(self.groups) > 1 or command.step == self.step
        self.running, self.broken, self.end = False, False, self.scene.steps
        self.changes = deque(x for x in self.changes if x[0] > command.settled)
        for entry in self.changes:
            self.agree(entry)
        if any(self.bodies[m].mute for m in self.group):
            return  # somebody does not come
        formed = self.formed()
        self.at(self.now_s + self.some_s(), lambda: self.feed(formed))
        self.at(self.now_s + self.some_s(), lambda: self.begin(command.generation))

    def begin(self, generation):
        if self.formed_as != generation:
            return  # another one died meanwhile
        self.running = True
        for m in self.group:
            body = self.bodies[m]
            body.flushed_s, body.generation = self.now_s, self.generation
            if m not in self.following and body.reported is None:
                body.reported = self.step
        self.follow()
        self.tread()

    def hold(self, member, number):
        self.bodies[member].holds.add(number)
        for entry in self.changes:
            if entry[0] == number:
                self.agree(entry)

    def agree(self, entry):
        """All members of the group hold the change: it takes effect some steps later."""
        number, change, due = entry
        if due is not None or not all(number in self.bodies[m].holds for m in self.group):
            return
        if isinstance(change, c.Meet) and any(self.bodies[m].mute for m in change.members):
            return  # somebody does not come to meet them
        entry[2] = self.step + (LEAD if isinstance(change, c.Extend) else 1)
        if isinstance(change, c.Extend):
            at = self.position
            for _ in range(LEAD):
                at = self.after(at)
            self.extend(at, change.samples)

    def grow(self, more):
        """Files are added: the pipeline says so, once it has read them."""
        self.samples, self.version = self.samples + more, self.version + 1
        self.feed(e.DataGrew(samples=self.samples, version=self.version))

    def publish(self, step):
        """Whoever goes back meanwhile does so behind this, and withdraws what comes after."""
        if step in self.manifests:
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
                if m in self.following:
                    self.flush(m)
                done = e.MemberDone(member=m, step=self.step, generation=self.formed_as)
                self.say(m, done)
            return
        fraction = self.taken(self.position) / self.scene.settings.global_batch
        takes_s = 0.01
        for m, share in zip(self.group, self.shares, strict=True):
            spent_s = share * fraction * self.speed(m) * self.random.uniform(0.9, 1.1)
            self.bodies[m].compute_s += spent_s
            self.bodies[m].micro_batches += share
            takes_s = max(takes_s, spent_s)
        formed_as = self.formed_as
        self.at(self.now_s + takes_s, lambda: self.commit(formed_as))

    def commit(self, formed_as):
        if formed_as != self.formed_as or any(self.bodies[m].mute for m in self.group):
            return
        if self.broken:
            return
        at, self.position = self.position, self.after(self.position)
        self.spans[self.step] = (at.epoch, at.offset, at.offset + self.taken(at))
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
            case c.Reshare(generation=generation, shares=shares, caught_up=caught_up):
                self.generation, self.shares = generation, shares
                assert all(self.bodies[m].reported is not None for m in caught_up)
                self.following = tuple(m for m in self.following if m not in caught_up)
                self.note_group()
            case c.Meet():
                self.become(change)
            case c.Extend():
                self.in_force = dict(self.sizes)
            case c.Halt():
                self.end = self.step

    def become(self, change):
        """The members that have met ahead go on as another generation."""
        self.meet(change)
        for body in map(self.bodies.__getitem__, self.holders()):
            if body.reported is None:  # it takes the state as all meet
                assert self.nearby
                body.reported, body.flushed_s = self.step, self.now_s
        self.say(self.group[0], self.formed())
        self.follow()

    def formed(self):
        return e.GenerationFormed(
            generation=self.generation,
            members=self.group,
            shares=self.shares,
            first_step=self.step,
        )

    def flush(self, m):
        body = self.bodies[m]
        if body.reported is None:
            return
        word = committed(
            m,
            body.reported,
            self.step,
            generation=self.generation,
            at=self.position,
            computed=sum(map(self.cut, range(body.reported, self.step))),
            micro_batches=body.micro_batches,
            compute_s=body.compute_s,
            bytes_last=self.nearby,
        )
        self.say(m, word)
        body.reported, body.flushed_s = self.step, self.now_s
        body.micro_batches, body.compute_s = 0, 0.0

    def note_group(self):
        """Who is there, and among which replicas a checkpoint is divided."""
        self.groups.append(self.holders())
        ranks = [rank for rank, m in enumerate(self.group) if m not in self.following]
        self.divided.add(tuple((rank, 0) for rank in ranks))

    def save(self):
        self.saved[self.step] = (self.position, tuple(sorted(self.in_force.items())))
        for m in self.holders():
            if self.bodies[m].reported != self.step:
                self.flush(m)
            replica = self.group.index(m)
            word = part(m, self.step, generation=self.generation, replica=replica)
            self.say(m, word, after_s=self.some_s())

    # ---- one run

    def run(self):
        self.carry_out(self.job.start(0.0), None)
        for stop_s in self.scene.stops_s:
            self.at(stop_s, lambda: self.feed(stop()))
        for grow_s, more in self.scene.grows:
            self.at(grow_s, lambda more=more: self.grow(more))
        for dies_s in self.scene.dies_s:
            self.at(dies_s, lambda: self.fault("dies"))
        for room_s, workers in self.scene.rooms:
            word = e.CapacityChanged(workers=workers)
            self.at(room_s, lambda word=word: self.feed(word))
        for leaves_s in self.scene.leaves_s:
            self.at(leaves_s, self.leaves)
        for breaks_s in self.scene.breaks_s:
            self.at(breaks_s, self.breaks)
        for diverges_s in self.scene.diverges_s:
            self.at(diverges_s, self.diverges)
        for kind in ("freezes", "fails"):
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
        answered = {m: 0.0 for m, body in self.bodies.items() if not body.mute}
        for m in answered:
            self.bodies[m].due_s = self.now_s + 1.0
        due_s = {m: body.due_s for m, body in self.bodies.items()}
        heard = Heard(looked_s=self.now_s, late_s=answered, due_s=due_s)
        self.log.append((heard, self.now_s, ()))
        self.job.hear(heard)
        lost = self.job.overdue(self.now_s)
        if lost is not None:
            self.feed(lost)
        self.carry_out(self.job.tick(self.now_s), "tick")
        if (
            self.job.phase in {Phase.WAITING, Phase.RESTORING}
            and self.now_s > PATIENCE_S
            and not self.gave_up
        ):
            self.gave_up = True
            self.feed(stop("it waits in vain"))
        if not self.job.finished:
            self.at(self.now_s + 1.0, self.tick)

    def check(self):
        job = self.job
        if job.ledger is None:
            return
        assert len(job.shares) == len(job.group)
        if job.group:
            assert sum(job.shares) == self.scene.settings.micro_batches
            assert min(job.shares) >= 0
            assert job.committed_step <= max(self.step, self.scene.settings.step)
        assert job.ledger.audit().exact
        assert job.ledger.next_step == job.committed_step

    def finish(self):
        return self.commands[-1]
