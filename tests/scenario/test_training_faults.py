"""Training itself under faults: real members, control, ledger and checkpoints in virtual time."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.control import shares
from raycloud.recovery import catch_up, quorum
from raycloud.recovery.catch_up import Follower
from raycloud.recovery.state_transfer import Sender
from raycloud.simulate.scenario import Kind
from raycloud.step.collate import PartialStep
from raycloud.step.replica import Replica
from raycloud.step.rounds import Rounds
from raycloud.step.stateful import Commit
from raycloud.step.statistics import RunningStatistics
from raycloud.sync.buckets import Bucket
from tests.scenario import faults, fleet
from tests.scenario.__main__ import main
from tests.scenario.faults import FOLLOWING, MEETING, POINTS, Blow
from tests.scenario.run import Outcome, Scenario, drawn, play
from tests.tiers import variants

SEEDS = range(2)
REST = tuple(point for point in POINTS if point not in {"delivered", "stand"})
SHORT = Scenario(
    seed=1,
    members=3,
    least=1,
    norm=True,
    speeds=(0.03, 0.03, 0.06),
    blows=(),
    steps=24,
    every_steps=8,
)

# One dies, and there is time for another to come in its place.
REPLACED = replace(
    SHORT,
    speeds=(0.1, 0.1, 0.1),
    steps=40,
    every_steps=10,
    blows=(Blow(at_step=5, kind=Kind.DIE, point="compute"),),
)
AT_ONCE = replace(REPLACED, at_once=True)


def sound(scenario: Scenario, folder: Path, repeat: str = "") -> Outcome:
    """What comes of a scenario, in which no promise is broken."""
    before = {*threading.enumerate()}
    outcome = play(scenario, folder)
    assert not outcome.wrong, "\n".join(
        [*outcome.story[-60:], *map(str, scenario.blows), *outcome.wrong, repeat]
    )
    assert outcome.status == "finished"
    assert outcome.apart <= scenario.tolerance
    assert not {*threading.enumerate()} - before
    return outcome


def hit(*blows: Blow, **settings: object) -> Scenario:
    return replace(SHORT, blows=blows, **settings)


@pytest.mark.full(only="ten faults one after the other")
@pytest.mark.parametrize("seed", variants(*SEEDS))
def test_ten_faults_in_two_hundred_steps(seed: int, tmp_path: Path) -> None:
    sound(drawn(seed), tmp_path, f"repeat: python -m tests.scenario --seed {seed}")


CODED = ("bf16", "int8", "int4")


@pytest.mark.parametrize("seed", variants(*range(6, 9)))
def test_faults_with_a_codec(seed: int, tmp_path: Path) -> None:
    """The ledger is exact, and members have the same bits, whatever the codec loses."""
    codec = CODED[seed % len(CODED)]
    sound(replace(drawn(seed, count=6, steps=60), codec=codec), tmp_path, f"seed {seed}, {codec}")


TREES = ("int4", "none", "int8")


@pytest.mark.parametrize("seed", variants(*range(12, 15)))
def test_faults_in_a_tree(seed: int, tmp_path: Path) -> None:
    """Likewise where sums are made by zones, and members are of two."""
    codec = TREES[seed % len(TREES)]
    scenario = replace(drawn(seed, count=6, steps=60), codec=codec, topology="tree")
    sound(scenario, tmp_path, f"seed {seed}, {codec}, tree")


@pytest.mark.parametrize("seed", variants(*range(9, 12), fast=2))
def test_faults_in_rounds(seed: int, tmp_path: Path) -> None:
    """The ledger is exact, and members have the same bits where a round begins."""
    codec, period = ("topk", "int4", "none")[seed % 3], 3 + seed % 3
    scenario = replace(drawn(seed, count=6, steps=60), codec=codec, period=period)
    sound(scenario, tmp_path, f"seed {seed}, {codec}, period {period}")


@pytest.mark.parametrize("seed", variants(*range(30, 36), fast=2))
def test_faults_while_fragments_travel(seed: int, tmp_path: Path) -> None:
    codec, stream = ("int4", "none", "topk")[seed % 3], (2, 4)[seed % 2]
    scenario = drawn(seed, count=6, steps=60)
    every = 12 if isinstance(scenario.every_steps, int) else scenario.every_steps
    scenario = replace(scenario, codec=codec, period=4, stream=stream, every_steps=every)
    sound(scenario, tmp_path, f"seed {seed}, {codec}, period 4, stream {stream}")


@pytest.mark.parametrize("seed", variants(*range(20, 24), fast=2))
def test_faults_where_rounds_change_their_length(seed: int, tmp_path: Path) -> None:
    codec = ("none", "int4")[seed % 2]
    scenario = replace(drawn(seed, count=6, steps=60), codec=codec, period="auto")
    outcome = sound(scenario, tmp_path, f"seed {seed}, {codec}, period auto")
    assert "from step" in "\n".join(outcome.story)


@pytest.mark.parametrize("point", variants("compute", "gradients", "lane", "commit", fast=2))
def test_a_member_dies_in_a_round(point: str, tmp_path: Path) -> None:
    blows = [Blow(at_step=step, kind=Kind.DIE, point=point) for step in (4, 12)]
    outcome = sound(hit(*blows, period=4), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 2)
    assert outcome.recoveries >= 1


@pytest.mark.parametrize("point", variants("gradients", "compute", "lane", "commit"))
def test_a_member_dies_with_a_fragment_on_its_way(point: str, tmp_path: Path) -> None:
    blows = [Blow(at_step=s, kind=Kind.DIE, point=point) for s in (9, 17)]
    outcome = sound(hit(*blows, period=4, stream=2, every_steps=None, steps=60), tmp_path)
    assert outcome.recoveries >= 1


def test_what_is_left_of_a_round_is_dealt_anew_where_one_becomes_far_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Blow(at_step=17, kind=Kind.SLOW, point="compute", lasts_s=100.0)
    scenario = replace(
        REPLACED, seed=4, speeds=(0.2,) * 3, period=16, steps=48, every_steps=None, blows=(slow,)
    )
    soon, late = tmp_path / "soon", tmp_path / "late"
    soon.mkdir()
    late.mkdir()
    outcome = sound(scenario, soon)
    assert "what is left of it is dealt anew" in "\n".join(outcome.story)
    monkeypatch.setattr(shares, "_REDEAL_S", 1e9)
    held_up = sound(scenario, late)
    assert "dealt anew" not in "\n".join(held_up.story)
    assert outcome.virtual_s < held_up.virtual_s - 5.0


def test_a_newcomer_follows_where_fragments_would_travel(tmp_path: Path) -> None:
    outcome = sound(replace(REPLACED, period=4, stream=2), tmp_path)
    assert outcome.members > REPLACED.members


def test_a_newcomer_follows_round_by_round(tmp_path: Path) -> None:
    outcome = sound(replace(REPLACED, period=4), tmp_path)
    assert (outcome.starts, outcome.recoveries, outcome.members) == (1, 1, 4)
    story = "\n".join(outcome.story)
    assert story.index("MemberCaughtUp(member=3") < story.index("Reshare(generation=3")


def test_a_broken_seed_is_told_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Replica, "commit_parts", lambda self, step: None)
    assert main(["--seed", "7", "--faults", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-2] == (
        "repeat: python -m tests.scenario --seed 7 --faults 0"
    )


def test_a_seed_gives_the_same_story_word_for_word(tmp_path: Path) -> None:
    scenario = drawn(3, steps=24)
    one, other = (play(scenario, tmp_path / name) for name in ("one", "other"))
    assert one.story == other.story
    assert one.digest == other.digest
    assert len(one.story) > 100
    assert play(drawn(4, steps=24), tmp_path / "another").digest != one.digest


def test_nothing_befalls_them(tmp_path: Path) -> None:
    outcome = sound(hit(), tmp_path)
    assert (outcome.starts, outcome.generations, outcome.members) == (1, 1, 3)


@pytest.mark.parametrize("point", variants("delivered", "stand", *REST, fast=2))
def test_a_member_dies_at_any_point_of_its_work(point: str, tmp_path: Path) -> None:
    once = Blow(at_step=5, kind=Kind.DIE, point="" if point in MEETING else point)
    again = Blow(at_step=5, kind=Kind.DIE, point=point)
    outcome = sound(hit(once, again), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 2)
    assert outcome.recoveries >= 1


@pytest.mark.parametrize("point", variants("delivered", "stand", *REST[::2]))
def test_all_die_at_any_point_of_their_work(point: str, tmp_path: Path) -> None:
    """They go on in the same start; those that come in their places may die, too."""
    first = Blow(at_step=11, kind=Kind.BREAK, point="lane")  # so that there is a meeting
    all_of_them = Blow(at_step=11, kind=Kind.DIE, point=point, many=3)
    again = Blow(at_step=18, kind=Kind.DIE, point="compute" if point in MEETING else point, many=3)
    outcome = sound(hit(first, all_of_them, again), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 3)
    assert outcome.members > 3


@pytest.mark.parametrize(
    ("kind", "point"),
    variants(
        *((kind, "gradients") for kind in (Kind.BREAK, Kind.FREEZE, Kind.CUT)),
        *((Kind.BREAK, point) for point in ("lane", "delivered", "stand")),
        (Kind.FREEZE, "lane"),
        (Kind.CUT, "stand"),
        fast=3,
    ),
)
def test_an_exchange_breaks_and_nobody_dies(kind: Kind, point: str, tmp_path: Path) -> None:
    first = Blow(at_step=5, kind=Kind.BREAK, point="lane")  # so that there is a meeting
    blow = Blow(at_step=5, kind=kind, point=point, lasts_s=9.0, many=2)
    outcome = sound(hit(first, blow), tmp_path)
    assert outcome.befallen == 2


@pytest.mark.parametrize("point", variants(*MEETING, "build", "commit"))
def test_two_in_one_recovery(point: str, tmp_path: Path) -> None:
    outcome = sound(
        hit(
            Blow(at_step=7, kind=Kind.DIE, point="delivered"),
            Blow(at_step=7, kind=Kind.DIE, point=point),
            Blow(at_step=7, kind=Kind.BREAK, point="stand"),
            members=4,
            speeds=(0.03, 0.03, 0.06, 0.03),
        ),
        tmp_path,
    )
    assert outcome.befallen == 3


def test_a_newcomer_follows_until_it_has_caught_up(tmp_path: Path) -> None:
    outcome = sound(REPLACED, tmp_path)
    assert (outcome.starts, outcome.recoveries, outcome.members) == (1, 1, 4)
    story = "\n".join(outcome.story)
    assert story.index("MemberCaughtUp(member=3") < story.index("Reshare(generation=3")


@pytest.mark.parametrize(
    ("kind", "point"),
    variants(
        (Kind.DIE, "send"),
        (Kind.CUT, "receive"),
        *((Kind.DIE, point) for point in FOLLOWING if point != "send"),
        *((kind, "send") for kind in (Kind.BREAK, Kind.FREEZE, Kind.CUT)),
        *((kind, "receive") for kind in (Kind.BREAK, Kind.FREEZE)),
        fast=2,
    ),
)
def test_it_befalls_them_while_the_state_goes_to_a_newcomer(
    kind: Kind, point: str, tmp_path: Path
) -> None:
    blow = Blow(at_step=6, kind=kind, point=point, lasts_s=9.0)
    outcome = sound(replace(REPLACED, blows=(*REPLACED.blows, blow)), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 2)
    assert not any("nobody passes" in line for line in outcome.story)


def test_a_newcomer_takes_the_state_where_all_meet(tmp_path: Path) -> None:
    outcome = sound(AT_ONCE, tmp_path)
    assert (outcome.starts, outcome.recoveries, outcome.members) == (1, 1, 4)
    assert not any("MemberCaughtUp" in line for line in outcome.story)


@pytest.mark.parametrize(
    ("kind", "point"),
    variants(
        *((Kind.DIE, point) for point in ("send", "sent", "receive")),
        *((kind, "send") for kind in (Kind.BREAK, Kind.FREEZE, Kind.CUT)),
        *((kind, "receive") for kind in (Kind.BREAK, Kind.CUT)),
    ),
)
def test_it_befalls_them_while_they_hand_it_over(kind: Kind, point: str, tmp_path: Path) -> None:
    blow = Blow(at_step=6, kind=kind, point=point, lasts_s=9.0)
    outcome = sound(replace(AT_ONCE, blows=(*AT_ONCE.blows, blow)), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 2)
    assert not any("nobody passes" in line for line in outcome.story)


@pytest.mark.parametrize("seed", variants(0, 67))
def test_who_catches_up_while_another_is_given_up_tells_its_steps_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "_SIDES", (("driver",),))  # so that it goes on computing meanwhile
    monkeypatch.setattr(fleet, "_CUT_S", (60.0, 61.0))  # for a while: its machine is not asked
    blow = Blow(at_step=6, kind=Kind.CUT, point="send", lasts_s=9.0)
    blows = (*REPLACED.blows, blow)
    outcome = sound(replace(REPLACED, seed=seed, steps=30, every_steps=None, blows=blows), tmp_path)
    story = "\n".join(outcome.story)
    first = story.index("MemberCaughtUp(member=3, generation=2")
    again = story.index("MemberCaughtUp(member=3, generation=3")
    assert "< StepsCommitted(3, " in story[first:again]


def test_a_state_that_does_not_come_is_taken_where_all_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catch_up, "_TRIES", 1)
    blow = Blow(at_step=6, kind=Kind.DIE, point="send")
    outcome = sound(replace(REPLACED, blows=(*REPLACED.blows, blow)), tmp_path)
    caught_up = r"MemberCaughtUp\(member=3, .*first_step=(\d+), step=(\d+)"
    found = re.search(caught_up, "\n".join(outcome.story))
    assert found is not None
    assert found[1] == found[2]


def test_members_that_begin_otherwise_take_the_first_ones_parameters(tmp_path: Path) -> None:
    blow = Blow(at_step=-1, kind=Kind.BREAK, point="take")
    outcome = sound(hit(blow, alike=False, seed=3), tmp_path)
    assert (outcome.starts, outcome.generations, outcome.recoveries) == (1, 2, 1)


def test_when_all_are_gone_the_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    outcome = sound(hit(Blow(at_step=15, kind=Kind.DIE, many=3)), tmp_path)
    assert outcome.starts == 1
    assert any("< RolledBack(step=8" in line for line in outcome.story)


def test_a_full_disk_costs_a_checkpoint_and_ends_nothing(tmp_path: Path) -> None:
    outcome = sound(hit(Blow(at_step=15, kind=Kind.FULL, lasts_s=6.0)), tmp_path)
    assert (outcome.starts, outcome.recoveries) == (1, 0)
    assert any("PartFailed" in line for line in outcome.story)


def test_some_are_cut_off_one_by_one_and_healed_in_another_order(tmp_path: Path) -> None:
    cut = Blow(at_step=5, kind=Kind.CUT, many=3, lasts_s=20.0)
    outcome = sound(hit(cut, members=5, speeds=(0.03,) * 5, steps=60), tmp_path)
    assert outcome.recoveries >= 1


def test_a_machine_that_says_that_it_goes_cuts_no_step(tmp_path: Path) -> None:
    leaves = Blow(at_step=5, kind=Kind.LEAVE, notice_s=8.0, lasts_s=5.0)
    outcome = sound(hit(leaves, steps=60), tmp_path)
    assert (outcome.recoveries, outcome.starts) == (0, 1)
    assert outcome.generations > 1


@pytest.mark.parametrize("kind", [Kind.JUMP, Kind.DEAF])
def test_nobody_is_given_up_where_the_driver_stood_still(kind: Kind, tmp_path: Path) -> None:
    blow = Blow(at_step=8, kind=kind, lasts_s=400.0 if kind is Kind.JUMP else 15.0)
    outcome = sound(hit(blow), tmp_path)
    assert (outcome.recoveries, outcome.members) == (0, 3)


FORGOTTEN_IN_ROUNDS = {
    "where a round began": (Rounds, "suspend", lambda self: None),
    "what was computed of it": (Rounds, "resume", lambda self: None),
    "whose state is taken": (quorum, "hand_over", lambda state, **_: None),
}


@pytest.mark.parametrize("what", FORGOTTEN_IN_ROUNDS)
def test_it_sees_what_is_forgotten_in_rounds(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner, name, instead = FORGOTTEN_IN_ROUNDS[what]
    monkeypatch.setattr(owner, name, instead)
    breaks = [Blow(at_step=step, kind=Kind.BREAK, point="compute") for step in range(9, 40, 4)]
    dies = [Blow(at_step=step, kind=Kind.DIE, point="delivered") for step in (9, 17, 25, 33)]
    scenario = hit(*breaks, *dies, period=4, steps=40)
    assert any(play(replace(scenario, seed=s), tmp_path / str(s)).wrong for s in range(1, 9))


def test_it_sees_a_round_that_a_newcomer_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Follower, "_commit", lambda self: self._kept.popleft())
    assert play(replace(REPLACED, period=4), tmp_path).wrong


FORGETFUL = {
    "the gradients that survive": (Replica, "suspend", Replica.discard),
    "terms of batch statistics": (RunningStatistics, "resume", RunningStatistics.stage),
    "what is kept": (PartialStep, "and_also", lambda self, work: PartialStep(step=work.span.step)),
    "that a buffer may be written to": (Bucket, "renew", lambda self: None),
    "whose state is taken": (quorum, "hand_over", lambda state, **_: None),
}


@pytest.mark.parametrize("what", FORGETFUL)
def test_it_sees_what_is_forgotten(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner, name, instead = FORGETFUL[what]
    monkeypatch.setattr(owner, name, instead)
    blows = [Blow(at_step=step, kind=Kind.BREAK, point="gradients") for step in range(1, 60, 4)]
    dies = [Blow(at_step=step, kind=Kind.DIE, point="delivered") for step in (5, 11, 21, 33)]
    # By chance nobody may have needed it: no seed alone is enough.
    assert any(play(hit(*blows, *dies, seed=s), tmp_path / str(s)).wrong for s in (1, 2, 3))


def _of_newest_alone(self: RunningStatistics, step: Commit) -> None:
    if step.sums is None:
        self._move(step.count, step.left_out)


UNFOLLOWED = {
    "a state changes while it is copied": (Sender, "settle", lambda self: None),
    "a step that is kept": (Follower, "_commit", lambda self: self._kept.popleft()),
    "its batch statistics": (RunningStatistics, "commit", _of_newest_alone),
}


@pytest.mark.parametrize("what", UNFOLLOWED)
def test_it_sees_what_a_newcomer_lacks(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner, name, instead = UNFOLLOWED[what]
    monkeypatch.setattr(owner, name, instead)
    assert play(REPLACED, tmp_path).wrong
