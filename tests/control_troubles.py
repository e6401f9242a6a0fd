"""What befalls members of a simulated fleet."""

from __future__ import annotations

from raycloud import events as e

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
                body.mute = True

        self.at(self.now_s + NOTICE_S, gone)

    def breaks(self):
        """A connection is cut between two steps; all hear of it, now or later."""
        if not self.running or self.broken or self.step >= self.end:
            return
        self.broken = True
        for m in self.group:
            word = e.ExchangeBroken(member=m, generation=self.formed_as, why="reset")
            self.say(m, word, after_s=self.some_s())
