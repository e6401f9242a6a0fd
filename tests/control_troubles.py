"""What befalls members of a simulated fleet."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from tests.control_events import ready
from tests.control_scene import Body

NOTICE_S = 4.0


class Troubles:
    """For a fleet with `job`, `bodies`, `random`, and an `at` to say when."""

    def fault(self, kind):
        if self.job.finished or not self.bodies:
            return
        alive = [m for m, body in sorted(self.bodies.items()) if not body.mute]
        if not alive:
            return
        member = self.random.choice(alive)
        if kind == "fails":
            self.say(member, e.MemberFailed(member=member, error="TaskError", message="no"))
        elif kind == "dies":
            lost = e.MemberLost(member=member, reason="died")
            self.at(self.now_s + self.some_s(), lambda: self.feed(lost))
        self.bodies[member].mute = True
        self.bodies[member].ended = kind != "freezes"

    def obey(self, command):
        match command:
            case c.Release(members=members):
                for m in members:
                    self.bodies[m].mute = self.bodies[m].ended = True
            case c.LeaveOut(member=member):
                self.bodies[member].mute = True
                self.left_out(member)
            case c.Readmit(member=member, process=process):
                self.readmit(member, process)

    def left_out(self, member):
        """It thaws sooner or later, or never, and what it says then is of no use."""
        after_s = self.random.choice([0.0, 0.5, 8.0, 80.0, None])

        def thaws():
            if not self.bodies[member].ended and not self.job.finished:
                self.feed(e.MemberReturned(member=member, late_s=after_s))

        if after_s is not None:
            self.at(self.now_s + after_s + self.some_s(), thaws)

    def readmit(self, member, process):
        """It goes on as another, with nothing that counts."""
        assert not self.bodies[process].ended
        self.bodies[process].ended = True
        self.bodies[member] = Body()
        self.say(member, e.MemberSpawned(member=member, node="n"))
        word = ready(member, samples=self.scene.samples, micro_batch_s=self.speed(member))
        self.say(member, word, after_s=self.random.choice([0.0, 0.5, 3.0]))
        if self.random.random() < 0.2:
            self.at(self.now_s + self.random.choice([1.0, 5.0]), lambda: self.refreeze(member))

    def refreeze(self, member):
        """Once more."""
        self.bodies[member].mute = True

    def leaves(self):
        """Somebody hears that its machine is going to be gone, and then it is."""
        alive = [m for m, body in sorted(self.bodies.items()) if not body.mute]
        if self.job.finished or not alive:
            return
        member = self.random.choice(alive)
        self.say(member, e.MemberLeaving(member=member, reason="spot", deadline_s=NOTICE_S))

        def gone():
            body = self.bodies.get(member)
            if body is not None and not body.mute and not self.job.finished:
                lost = e.MemberLost(member=member, reason="its node is gone")
                self.at(self.now_s + self.some_s(), lambda: self.feed(lost))
                body.mute = body.ended = True

        self.at(self.now_s + NOTICE_S, gone)

    def diverges(self):
        """All see that the present step is not finite, and those that have the state say so."""
        if not self.running or self.broken or self.step >= self.end:
            return
        self.broken = True
        made_by = self.random.choice([self.step, max(0, self.step - 1), None])
        for m in self.holders():
            self.flush(m)
            where = {"generation": self.formed_as, "step": self.step, "left_out": made_by}
            word = e.StepNotFinite(member=m, why="the loss is nan", **where)
            self.say(m, word, after_s=self.some_s())

    def breaks(self):
        """A connection is cut between two steps; all hear of it, now or later."""
        if not self.running or self.broken or self.step >= self.end:
            return
        self.broken = True
        for m in self.group:
            word = e.ExchangeBroken(member=m, generation=self.formed_as, why="reset")
            self.say(m, word, after_s=self.some_s())
