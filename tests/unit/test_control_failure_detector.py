"""Members that do not answer: frozen or cut off, where others are heard meanwhile."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.heartbeats import Heard, Heartbeats
from tests.control_events import part, ready
from tests.control_job import control, only, tick
from tests.control_three import formed, three, to

LOOK_S = 0.25


class World:
    """Calls every second, and looks four times a second who has answered.

    Args:
        job: Under control.
        now_s: When it begins.
        members: How many it has.
    """

    def __init__(self, job, now_s=2.0, members=3):
        self.job, self.now_s, self.looked_s = job, now_s, now_s
        self.members = tuple(range(members))
        self.due_s = {m: now_s + 1.0 + m / 10 for m in self.members}

    def go(self, until_s, silent=(), late_s=0.0):
        """Everyone answers but those who are silent; member 1 with a delay every other time."""
        commands = []
        while self.now_s < until_s:
            self.now_s += LOOK_S
            commands += self.look(silent, late_s)
        return commands

    def cut(self, until_s, **cut_s):
        """Machines by name that are cut off from the first look on; the others' answer."""
        commands, cut, from_s = [], {int(m[1:]): s for m, s in cut_s.items()}, self.now_s
        reached = frozenset(self.members) - set(cut)
        while self.now_s < until_s:
            self.now_s += 0.05
            late = {m: 0.0 for m in reached if self.now_s >= self.due_s[m]}
            self.due_s |= dict.fromkeys(late, self.now_s + 1.0)
            since_s = {m: s + self.now_s - from_s for m, s in cut.items()}
            self.job.hear(
                Heard(
                    looked_s=self.now_s,
                    late_s=late,
                    due_s=dict(self.due_s),
                    cut_s={m: s for m, s in since_s.items() if s > 0.0},
                    reached=reached,
                )
            )
            commands += tick(self.job, self.now_s)
        return commands

    def look(self, silent=(), late_s=0.0):
        late = {}
        for m in self.members:
            wait_s = late_s if m == 1 and int(self.now_s) % 2 else 0.0
            if m not in silent and self.now_s >= self.due_s[m] + wait_s:
                late[m] = max(0.0, self.looked_s - self.due_s[m])
                self.due_s[m] = self.now_s + 1.0
        self.looked_s = self.now_s
        self.job.hear(Heard(looked_s=self.now_s, late_s=late, due_s=dict(self.due_s)))
        return tick(self.job, self.now_s)


def test_who_does_not_answer_while_others_do_is_lost():
    job = three()
    to(job, 5)
    world = World(job)
    assert world.go(20.0) == []
    commands = world.go(22.75, silent=(1,))  # it froze at 20 s
    assert only(c.Form, commands).members == (0, 2)
    assert not world.go(30.0, silent=(1,))


def test_its_loss_is_an_event_that_says_why():
    job = three()
    to(job, 5)
    world = World(job)
    world.go(20.0)
    found = None
    while found is None:
        world.now_s += LOOK_S
        assert world.now_s < 23.0
        due_s = {**dict.fromkeys((0, 2), world.now_s + 1.0), 1: world.due_s[1]}
        answers = dict.fromkeys((0, 2), 0.0)
        job.hear(Heard(looked_s=world.now_s, late_s=answers, due_s=due_s))
        found = job.overdue(world.now_s)
    assert found.member == 1
    assert "frozen, or cut off" in found.reason
    assert only(c.Form, job.on(found, world.now_s)).members == (0, 2)


def test_where_nobody_answers_nobody_is_lost_also_when_they_come_back_one_by_one():
    job = three()
    to(job, 5)
    world = World(job)
    assert world.go(20.0) == []
    assert world.go(30.0, silent=(0, 1, 2)) == []
    assert world.go(31.0, silent=(1, 2)) == []
    assert world.go(50.0) == []
    assert only(c.Form, world.go(53.0, silent=(2,))).members == (0, 1)


def test_a_driver_that_stood_still_takes_nobody_for_lost():
    job = three()
    to(job, 5)
    world = World(job)
    assert world.go(20.0) == []
    world.now_s += 6.0  # it looks only now, and not all that was said has come in by then
    assert world.look(silent=(1, 2)) == ()
    assert world.go(40.0) == []


def test_nobody_was_silent_while_the_driver_stood_still():
    """Its machine was paused, or its clock jumped; words come one by one then."""
    job = three(silence_s=60.0)
    to(job, 5)
    world = World(job)
    assert world.go(20.0) == []
    world.now_s += 900.0
    assert world.go(930.0) == []
    assert only(c.Form, world.go(990.0)).members == (1, 2)  # nothing was reported since


def test_who_is_often_late_is_waited_for():
    job = three()
    to(job, 5)
    world = World(job)
    assert world.go(40.0, late_s=1.0) == []
    assert world.go(42.5, silent=(1,)) == []
    assert only(c.Form, world.go(59.0, silent=(1,))).members == (0, 2)


def test_how_late_it_was_before_it_computed_tells_nothing():
    job = control(min_workers=1, max_workers=3, capacity=3)
    job.start(-60.0)
    for looked_s in range(-60, 0):  # each answer comes 15 s late
        job.hear(Heard(looked_s=looked_s, late_s={0: 0.0, 1: 15.0, 2: 0.0}, due_s={}))
    for member in (0, 1, 2):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    world = World(job)
    world.go(20.0)
    assert only(c.Form, world.go(22.75, silent=(1,))).members == (0, 2)


def test_who_cannot_be_done_without_is_waited_for():
    job = three(min_workers=3)
    to(job, 5)
    world = World(job)
    world.go(20.0)
    assert world.go(40.0, silent=(1,)) == []


def test_who_is_done_need_not_answer():
    job = three()
    to(job, 5)
    job.on(part(1, 5), 1.5)
    job.on(e.MemberDone(member=1, step=5), 1.5)
    world = World(job)
    world.go(20.0)
    assert world.go(40.0, silent=(1,)) == []


def four():
    job = control(min_workers=1, max_workers=4, capacity=4)
    job.start(0.0)
    for member in range(4):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    world = World(job, members=4)
    assert world.go(20.0) == []
    return world


def test_several_machines_at_once_are_waited_for_a_little_longer():
    world = four()
    assert world.go(21.5, silent=(1, 2)) == []
    assert world.go(23.0) == []
    forms = [one for one in world.go(47.0, silent=(1, 2)) if isinstance(one, c.Form)]
    assert forms[-1].members == (0, 3)


def test_a_machine_that_is_known_to_be_cut_off_is_not_waited_for():
    world = four()
    assert only(c.Form, world.cut(20.06, m1=0.4)).members == (0, 2, 3)
    world = four()
    job, now_s = world.job, 20.1
    cut_s, due_s = {1: 0.45}, dict(world.due_s)
    job.hear(Heard(looked_s=now_s, due_s=due_s, cut_s=cut_s, reached=frozenset({0, 2, 3})))
    lost = job.overdue(now_s)
    assert (lost.member, lost.silent) == (1, True)
    assert lost.reason == "gone, or cut off: its machine acknowledges nothing since 0.5 s"


def test_several_that_are_cut_off_are_waited_for_a_little():
    world = four()
    assert world.cut(20.04, m1=0.25, m2=0.25) == []
    forms = [one for one in world.cut(20.15, m1=0.4, m2=0.4) if isinstance(one, c.Form)]
    assert forms[-1].members == (0, 3)


def test_where_more_are_cut_off_than_not_it_is_rather_the_driver():
    world = four()
    assert world.cut(21.0, m1=0.4, m2=0.4, m3=0.4) == []
    world = four()
    assert world.cut(21.0, m0=0.4, m1=0.4, m2=0.4, m3=0.4) == []


def test_who_answers_is_not_cut_off_whatever_its_machine_says():
    """The connection that it is asked along is out, and no other."""
    world = four()
    world.job.hear(Heard(looked_s=20.0, late_s={1: 0.0}, due_s={1: 21.0}))
    reached = frozenset({0, 2, 3})
    for n in range(1, 10):
        cut_s = {1: 0.3 + 0.1 * n}  # since 19.7 s, and it answered at 20
        looked_s = 20.0 + 0.1 * n
        world.job.hear(Heard(looked_s=looked_s, due_s={1: 21.0}, cut_s=cut_s, reached=reached))
        assert world.job.overdue(looked_s) is None


def test_an_answer_that_was_on_its_way_says_nothing_for_long():
    """The last packet came at 19.9 s, and the answer at 20 s."""
    world = four()
    reached = frozenset({0, 2, 3})
    world.job.hear(Heard(looked_s=20.0, late_s={1: 0.0}, due_s={1: 21.0}))
    world.job.hear(Heard(looked_s=20.08, due_s={1: 21.0}, cut_s={1: 0.18}, reached=reached))
    assert world.job.overdue(20.08) is None
    world.job.hear(Heard(looked_s=20.15, due_s={1: 21.0}, cut_s={1: 0.25}, reached=reached))
    assert world.job.overdue(20.15).member == 1


def test_who_cannot_be_done_without_is_waited_for_also_where_it_is_cut_off():
    job = three(min_workers=3)
    to(job, 5)
    world = World(job)
    world.go(20.0)
    assert world.cut(21.0, m1=0.5) == []


def test_most_machines_at_once_are_waited_for():
    """One member sits beside the driver, whose link is out: it is heard, the others are not."""
    job = three()
    to(job, 5)
    world = World(job)
    world.go(20.0)
    assert world.go(29.0, silent=(1, 2)) == []
    assert world.go(40.0) == []
    assert only(c.Form, world.go(53.0, silent=(1, 2))[:2]).members == (0, 2)


def test_who_answers_but_does_not_compute_is_lost():
    job = three(still_s=2.0)
    to(job, 5)

    def look(now_s, **still_s):
        job.hear(Heard(looked_s=now_s, still_s={int(m[1:]): s for m, s in still_s.items()}))
        return job.overdue(now_s)

    assert look(3.0, m1=1.4) is None
    assert look(4.0) is None  # it went on
    assert look(6.0, m1=1.9) is None
    lost = look(7.0, m1=2.1)
    assert lost.member == 1
    assert "stands still: no processor time for 2.1 s" in lost.reason
    job.on(lost, 7.0)
    assert job.overdue(7.1) is None


def test_who_stands_still_is_replaced_also_where_the_others_are_too_few():
    job = three(min_workers=3)
    to(job, 5)
    job.hear(Heard(looked_s=9.0, still_s={1: 30.0}))
    assert job.overdue(9.0).member == 1
    job = control(min_workers=1, max_workers=1, capacity=1)
    job.start(0.0)
    job.on(ready(0), 0.0)
    job.on(formed(job, 0), 0.0)
    job.hear(Heard(looked_s=9.0, still_s={0: 30.0}))
    assert job.overdue(9.0) is None  # nobody else has the state


def test_whose_answers_never_came_was_never_heard():
    heartbeats = Heartbeats(patience_s=1.0)
    for second in range(9):
        heartbeats.hear(Heard(looked_s=float(second), late_s={1: 0.5}))
    assert heartbeats.heard_since(7.0, (1, 70)) == 1
    assert heartbeats.phi(1, 1.0) < heartbeats.phi(70, 1.0) == heartbeats.phi(71, 1.0)
    heartbeats.begin((1,))
    assert heartbeats.phi(1, 1.0) == heartbeats.phi(70, 1.0)
    assert heartbeats.heard_since(7.0, (1,)) == 1
