"""When faults happen, and to whom: with hands that only note it."""

from __future__ import annotations

from raycloud.clock import VirtualClock
from raycloud.events import (
    Event,
    ExchangeBroken,
    GenerationFormed,
    MemberLost,
    Recovered,
    StepsCommitted,
)
from raycloud.faults import NO_CONNECTION, Action, Fault, Injector, NoConnectionError
from tests.logs import commit, ready


class Noting:
    """Hands that harm nobody."""

    def __init__(self, refuses: str = "") -> None:
        self.done: list[tuple[int, str]] = []
        self.refuses = refuses

    def hold(self, member: int, node: str, pid: int) -> None:
        if self.refuses == "hold":
            raise ProcessLookupError("it is none of ours")

    def harm(self, member: int, action: Action) -> None:
        if self.refuses == "cut":
            raise NoConnectionError(NO_CONNECTION)
        if self.refuses == "harm":
            raise PermissionError(1, "Operation not permitted")
        self.done.append((member, action.value))

    def thaw(self, member: int) -> None:
        self.done.append((member, "thaw"))

    def close(self) -> None:
        self.done.append((-1, "close"))


def formed(*members: int, generation: int = 0) -> GenerationFormed:
    shares = (1,) * len(members)
    return GenerationFormed(generation=generation, members=members, shares=shares, first_step=0)


def told(member: int, last: int) -> StepsCommitted:
    return commit(member, last - 1, last)


class Scene:
    """An injector with three members that have committed the first step."""

    def __init__(self, *faults: Fault, refuses: str = "") -> None:
        self.clock, self.hands = VirtualClock(), Noting(refuses)
        self.said: list[str] = []
        self.injector = Injector(faults, self.hands, self.clock, self.said.append)
        self.see(*map(ready, (0, 1, 2)), formed(0, 1, 2), *(told(m, 1) for m in (0, 1, 2)))

    def see(self, *events: Event) -> None:
        for event in events:
            self.injector.see(event)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.injector.look()

    @property
    def done(self) -> list[tuple[int, str]]:
        return self.hands.done


def test_a_fault_comes_with_its_step_and_by_rank() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=5, rank=4))
    scene.see(told(0, 4))
    assert scene.done == []
    scene.see(told(2, 5))
    assert scene.done == [(1, "kill")]
    [hit] = scene.injector.hits
    assert (hit.member, hit.step, hit.why) == (1, 5, "")
    assert scene.said == ["fault: step 5: kill: member 1"]
    assert scene.injector.left == ()


def test_a_fault_comes_with_its_second() -> None:
    scene = Scene(Fault(action=Action.TERMINATE, at_s=3.0))
    scene.wait(2.9)
    assert scene.done == []
    scene.wait(0.2)
    assert scene.done == [(0, "terminate")]


def test_several_are_hit_at_once_and_one_is_left() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2, many=2, rank=2), Fault(action=Action.KILL, at_step=2)
    )
    scene.see(told(0, 2))
    assert scene.done == [(2, "kill"), (0, "kill")]
    scene.see(told(1, 9))
    assert len(scene.injector.left) == 1  # nobody else has the state


def test_a_fault_waits_until_a_newcomer_has_the_state() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2, many=2), Fault(action=Action.KILL, at_step=3)
    )
    scene.see(told(0, 2), MemberLost(member=0, reason=""), MemberLost(member=1, reason=""))
    scene.see(told(2, 3), ready(3), formed(2, 3, generation=1))
    assert len(scene.done) == 2
    scene.see(told(3, 4))
    assert scene.done[2:] == [(2, "kill")]


def test_one_comes_during_the_recovery_from_another() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2),
        Fault(action=Action.CUT, at_step=2, recovering=True),
    )
    scene.see(told(0, 2))
    assert scene.done == [(0, "kill")]
    scene.see(ExchangeBroken(member=1, generation=0, why="reset"))
    assert scene.done[1:] == [(1, "cut")]
    assert scene.injector.left == ()


def test_a_late_word_of_what_is_over_begins_no_recovery() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=2, recovering=True))
    broken = ExchangeBroken(member=1, generation=0, why="reset")
    scene.see(Recovered(generation=1, lost=(), cause="", detected_s=0.0, resumed_s=1.0), broken)
    scene.see(told(0, 2))
    assert scene.done == []
    scene.see(ExchangeBroken(member=2, generation=1, why="reset"))
    assert scene.done == [(0, "kill")]


def test_what_is_to_come_during_a_recovery_does_not_come_after_it() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=2, recovering=True))
    scene.see(MemberLost(member=1, reason=""))
    scene.see(Recovered(generation=1, lost=(1,), cause="", detected_s=0.0, resumed_s=1.0))
    scene.see(told(0, 2))
    assert scene.done == []


def test_a_frozen_one_thaws_in_time_and_may_be_hit_again() -> None:
    scene = Scene(
        Fault(action=Action.FREEZE, at_step=2, seconds=1.5, many=2),
        Fault(action=Action.KILL, at_step=2),
    )
    scene.see(told(0, 2))
    assert scene.done == [(0, "freeze"), (1, "freeze")]
    scene.wait(1.0)
    assert len(scene.done) == 2
    scene.wait(0.5)
    assert scene.done[2:] == [(0, "thaw"), (1, "thaw"), (0, "kill")]


def test_a_cut_harms_nobody_for_long() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), Fault(action=Action.CUT, at_step=2))
    scene.see(told(0, 2))
    assert scene.done == [(0, "cut"), (0, "cut")]


def test_a_cut_waits_for_connections() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), refuses="cut")
    scene.see(told(0, 2))
    assert (scene.injector.hits, scene.said) == ([], [])
    scene.hands.refuses = ""
    scene.wait(0.1)
    assert scene.done == [(0, "cut")]
    assert scene.injector.left == ()


def test_what_cannot_be_done_is_told() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), refuses="harm")
    scene.see(told(0, 2))
    [hit] = scene.injector.hits
    assert hit.why == "Operation not permitted"
    assert scene.said == ["fault: step 2: cut: member 0, but Operation not permitted"]


def test_who_cannot_be_reached_is_told() -> None:
    scene = Scene(refuses="hold")
    assert scene.said[0] == "note: no fault can reach member 0: it is none of ours"


def test_nobody_stays_frozen() -> None:
    scene = Scene(Fault(action=Action.FREEZE, at_step=2, seconds=100.0))
    with scene.injector.at_work():
        scene.see(told(0, 2))
    assert scene.done == [(0, "freeze"), (-1, "close")]
