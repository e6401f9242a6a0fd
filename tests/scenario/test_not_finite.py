"""Training itself where steps are not finite: all go back, and the result lacks those alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.checkpoint import open_store, steps
from raycloud.order import Position, Steps
from raycloud.simulate.scenario import Kind
from raycloud.step import commit
from tests.scenario.faults import Blow
from tests.scenario.run import TOLERANCE, Outcome, Scenario, drawn, play
from tests.scenario.task import StagedTask, asked, bad_in
from tests.tiers import variants

STEPS = 14


def taken() -> list[set[int]]:
    """The samples of each step."""
    job, task = asked(norm=False, steps=STEPS), StagedTask(norm=False)
    cut = Steps(samples=task.samples, global_batch=job.global_batch, micro_batch=job.micro_batch)
    at, found = Position(), []
    for step in range(STEPS):
        span = cut.span(step, at)
        found.append(bad_in(job, span, range(task.samples)))
        at = cut.after(span)
    return found


BAD = (min(taken()[4]),)
SHORT = Scenario(
    seed=1,
    members=3,
    least=1,
    norm=True,
    speeds=(0.5, 0.5, 1.0),
    blows=(),
    steps=STEPS,
    every_steps=2,
    bad=BAD,
)


def sound(scenario: Scenario, folder: Path) -> Outcome:
    """What comes of a scenario: what a single process has that never computed those steps."""
    outcome = play(scenario, folder)
    told = [*outcome.story[-60:], *map(str, scenario.blows), *outcome.wrong]
    assert not outcome.wrong, "\n".join(told)
    assert outcome.status == "finished"
    assert outcome.apart <= TOLERANCE
    return outcome


def bad_steps() -> list[int]:
    return [step for step, samples in enumerate(taken()) if samples & set(BAD)]


def of(kind: str, outcome: Outcome) -> list[str]:
    return [line for line in outcome.story if f" {kind}(" in line]


def test_all_go_back_in_place_and_on_without_the_step(tmp_path: Path) -> None:
    outcome = sound(SHORT, tmp_path)
    assert (outcome.starts, outcome.members) == (1, 3)  # no process is started anew
    back = [re.findall(r"step=(\d+)", line)[0] for line in of("RolledBack", outcome)]
    assert back[0] in {"2", "4"}
    assert len(back) == outcome.recoveries == len(bad_steps())
    told = of("StepNotFinite", outcome)
    assert "the loss is nan at step 4" in told[0]
    assert "left_out=4" in told[0]


def test_without_a_checkpoint_others_begin_at_the_beginning(tmp_path: Path) -> None:
    outcome = sound(replace(SHORT, every_steps=None, steps=8), tmp_path)
    assert outcome.starts == 1
    assert outcome.members > 3
    assert all("step=0" in line for line in of("RolledBack", outcome))


def test_an_update_that_spoils_a_parameter_is_left_out_and_its_checkpoints_withdrawn(
    tmp_path: Path,
) -> None:
    outcome = sound(replace(SHORT, every_steps=1, spoils=True), tmp_path)
    assert outcome.members == 3
    told = of("StepNotFinite", outcome)
    assert "the parameters are not finite before it" in told[0]
    assert "step=5" in told[0]
    assert "left_out=4" in told[0]
    restores = of("Restore", outcome)
    assert "newest=4" in restores[0]
    assert STEPS in steps(open_store(tmp_path))


def test_where_it_is_not_seen_in_time_an_older_checkpoint_is_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a checkpoint had been made long after a parameter was spoiled."""
    monkeypatch.setattr(commit, "newest_update", lambda step, _: step)
    outcome = play(replace(SHORT, every_steps=1, spoils=True, steps=7), tmp_path)
    told = of("StepNotFinite", outcome)
    assert any("the checkpoint of step 5 is not finite" in line for line in told)
    assert any("left_out=None" in line for line in told)


def test_the_last_update_may_spoil_it_too(tmp_path: Path) -> None:
    last = bad_steps()[-1]
    outcome = sound(replace(SHORT, spoils=True, steps=last + 1), tmp_path)
    assert f"the run would end at step {last + 1}, and the" in of("StepNotFinite", outcome)[-1]


@pytest.mark.parametrize(
    ("kind", "point"),
    variants(
        *((Kind.DIE, point) for point in ("stand", "lane", "gradients", "delivered", "meet")),
        *((Kind.BREAK, point) for point in ("lane", "meet")),
        *((Kind.FREEZE, point) for point in ("gradients", "stand")),
    ),
)
def test_it_befalls_them_as_they_go_back(kind: Kind, point: str, tmp_path: Path) -> None:
    blows = (
        Blow(at_step=4, kind=kind, point=point, lasts_s=9.0),
        Blow(at_step=8, kind=kind, point=point, lasts_s=9.0),
    )
    outcome = sound(replace(SHORT, blows=blows), tmp_path)
    assert outcome.starts == 1


def test_all_die_after_they_have_gone_back(tmp_path: Path) -> None:
    """Others leave it out as well."""
    blow = Blow(at_step=5, kind=Kind.DIE, point="compute", many=3)
    outcome = sound(replace(SHORT, blows=(blow,)), tmp_path)
    assert outcome.members > 3


@pytest.mark.parametrize("seed", variants(5, 0))
def test_among_other_faults(seed: int, tmp_path: Path) -> None:
    sound(replace(drawn(seed, count=6, steps=60), bad=BAD, spoils=seed % 2 == 1), tmp_path)
