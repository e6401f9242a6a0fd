"""How members of a simulated fleet meet, and how newcomers follow until they have the state."""

from __future__ import annotations

from raycloud import events as e


class Following:
    """For a fleet with its `group`, `bodies`, `step`, `random`, and an `at` to say when."""

    def meet(self, told):
        """Who was not among them before has nothing that counts."""
        for m in told.members:
            if m not in self.group and self.groups:
                self.bodies[m].reported = None
        self.group, self.shares, self.following = told.members, told.shares, told.following
        self.generation = self.formed_as = told.generation
        assert self.group[0] not in self.following
        self.note_group()

    def holders(self):
        return tuple(m for m in self.group if m not in self.following)

    def follow(self):
        """Who has no state gets it while the others compute, or as they meet."""
        as_one, first_step = self.formed_as, self.step

        def caught_up(m):
            body = self.bodies[m]
            ended = self.formed_as != as_one or self.step >= self.end
            if ended or body.mute or m not in self.following:
                return
            if body.reported is None:
                body.reported, body.flushed_s = self.step, self.now_s
            word = e.MemberCaughtUp(
                member=m, generation=as_one, first_step=first_step, step=body.reported
            )
            self.say(m, word)

        for m in self.following:
            late_s = self.random.choice([0.0, 0.3, 3.0])
            if self.bodies[m].reported is not None or not late_s:
                caught_up(m)
            else:
                self.at(self.now_s + late_s, lambda m=m: caught_up(m))
