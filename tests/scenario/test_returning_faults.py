"""Members that were silent for a while join again in the same process, and corrupt nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.simulate.scenario import Kind
from tests.scenario import faults
from tests.scenario.faults import MEETING, WORKING, Blow
from tests.scenario.test_training_faults import SHORT, sound
from tests.tiers import variants

SILENT_S = 8.0
THREE = replace(SHORT, speeds=(0.1, 0.1, 0.1), steps=70, every_steps=10)


def silent(at_step: int, point: str = "", kind: Kind = Kind.FREEZE, many: int = 1) -> Blow:
    return Blow(at_step=at_step, kind=kind, point=point, lasts_s=SILENT_S, many=many)


@pytest.fixture(autouse=True)
def _cut_off_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_SIDES", (("peers", "driver"),))


@pytest.mark.parametrize(
    ("kind", "point"),
    variants(
        (Kind.FREEZE, ""),
        (Kind.CUT, ""),
        *zip((Kind.FREEZE, Kind.CUT) * 3, WORKING, strict=True),
        fast=2,
    ),
)
def test_it_is_silent_at_any_point_of_its_work(kind: Kind, point: str, tmp_path: Path) -> None:
    outcome = sound(replace(THREE, blows=(silent(8, point, kind),)), tmp_path)
    assert (outcome.starts, outcome.befallen) == (1, 1)
    story = "\n".join(outcome.story)
    assert outcome.returned == story.count("LeaveOut(member=")
    assert outcome.returned == 1 or kind is Kind.CUT  # which may be over before it is lost
    assert story.count("MemberCaughtUp(member=") == outcome.returned


@pytest.mark.full(only="two are silent, one after the other")
@pytest.mark.parametrize("point", variants("send", *MEETING[::2], "receive", "copy"))
def test_another_is_silent_while_they_meet_or_while_it_follows(point: str, tmp_path: Path) -> None:
    blows = (silent(8, "compute"), silent(24, point), silent(24, point))
    outcome = sound(replace(THREE, blows=blows, steps=110), tmp_path)
    assert outcome.returned >= 1


@pytest.mark.full
def test_it_is_silent_again_and_again(tmp_path: Path) -> None:
    blows = tuple(silent(step, "gradients") for step in (5, 30, 55))
    outcome = sound(replace(THREE, blows=blows, steps=130), tmp_path)
    assert (outcome.starts, outcome.returned) == (1, 3)


def test_two_are_silent_at_once(tmp_path: Path) -> None:
    five = replace(THREE, members=5, speeds=(0.1,) * 5, steps=80)
    outcome = sound(replace(five, blows=(silent(8, many=2),)), tmp_path)
    assert outcome.returned == 2


def test_the_last_that_has_the_state_dies_while_another_is_away(tmp_path: Path) -> None:
    dies = Blow(at_step=12, kind=Kind.DIE, many=3)
    outcome = sound(replace(THREE, blows=(silent(8), dies)), tmp_path)
    assert outcome.starts == 1
    assert any("< RolledBack" in line for line in outcome.story)
