"""Runs one contestant in one scenario once, and says what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import journal
from benchmarks.racing.contestant import Attempt, Contestant, environment
from benchmarks.racing.measures import Observation, node_rates
from benchmarks.racing.registry import SUMMED
from benchmarks.racing.results import is_ours
from benchmarks.racing.running import EndedError, Race
from benchmarks.racing.target import following, read_losses
from benchmarks.testbed import Testbed

if TYPE_CHECKING:
    from benchmarks.racing.meters import Used
    from benchmarks.racing.scenarios import Scenario, Settings

_FINISH_S = 120.0  # for the snapshots that are left to evaluate
_LAST_STEPS_S = 30.0
_REASON_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of one run.

    Attributes:
        observation: What is measured from.
        used: What its window cost; None where it had none.
        not_done: Events that found nobody, in words.
    """

    observation: Observation
    used: Used | None
    not_done: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The limit.

    Attributes:
        by_node: Samples per second of every node, all computing at once without exchange.
        failed: Why they are not known; empty where they are.
    """

    by_node: Mapping[str, float]
    failed: str = ""


def race(contestant: Contestant, scenario: Scenario, settings: Settings, directory: Path) -> Seen:
    """Run a contestant that is prepared.

    Args:
        contestant: Whom.
        scenario: In what.
        settings: How.
        directory: An empty one with a short path; all that is written goes there.

    Raises:
        MissingError: There can be no testbed here.
        ClusterError: Ray does not come up on it.
        ToolError: The testbed cannot be made or changed.
    """
    attempt = _attempt(contestant, scenario, settings, directory)
    losses, failed = directory / "losses.jsonl", ""
    evaluating = following(
        attempt.snapshots,
        losses,
        small=settings.small,
        environment=environment(attempt),
        finish_s=_FINISH_S,
    )
    # What is left to evaluate is done once the testbed is gone.
    with contextlib.ExitStack() as after, Testbed(scenario.spec) as bed:
        run = Race(
            bed=bed,
            contestant=contestant,
            scenario=scenario,
            attempt=attempt,
            settings=settings,
        )
        try:
            run.start()
            run.warm_up()
            run.measure()
            if settings.target_loss is not None:
                after.enter_context(evaluating)
                run.until_target(losses)
        except EndedError as error:
            failed = str(error)[:_REASON_CHARACTERS]
        finally:
            run.close()
    observation = Observation(
        t0_s=run.t0_s,
        window=run.window,
        journals=journal.read(attempt.journals),
        faults=tuple(run.faults),
        changes=tuple(run.changes),
        sent_bytes=run.used.sent_bytes if run.used else 0,
        losses=read_losses(losses),
        target_loss=settings.target_loss,
        summed=contestant.name in SUMMED,
        failed=failed,
    )
    return Seen(observation=observation, used=run.used, not_done=tuple(run.not_done))


def measure_limit(
    contestant: Contestant, scenario: Scenario, settings: Settings, directory: Path
) -> Speeds:
    """What each node that the scenario ever has computes, all at once, with quotas and raylets.

    Args:
        contestant: The one that exchanges nothing.
        scenario: In what.
        settings: How.
        directory: An empty one with a short path.

    Raises:
        MissingError: There can be no testbed here.
        ClusterError: Ray does not come up on it.
        ToolError: The testbed cannot be made.
    """
    alone = dataclasses.replace(scenario, spec=scenario.everyone, events=())
    attempt = _attempt(contestant, alone, settings, directory)
    with Testbed(alone.spec) as bed:
        run = Race(
            bed=bed, contestant=contestant, scenario=alone, attempt=attempt, settings=settings
        )
        try:
            run.start()
            run.wait(
                lambda: run.begun() == set(bed.nodes),
                run.t0_s + settings.first_update_limit_s,
                "not every node has computed an update",
            )
            start_s = run.pass_time(settings.limit_warm_up_s)
            end_s = run.pass_time(settings.limit_window_s)
            run.wait(  # for the steps that the end has cut
                lambda: run.begun(end_s) == set(bed.nodes), end_s + _LAST_STEPS_S, "not every step"
            )
        except EndedError as error:
            return Speeds(by_node={}, failed=str(error)[:_REASON_CHARACTERS])
        finally:
            run.close()
    return Speeds(by_node=node_rates(journal.read(attempt.journals), start_s, end_s))


def _attempt(
    contestant: Contestant, scenario: Scenario, settings: Settings, directory: Path
) -> Attempt:
    nodes = tuple(node.name for node in scenario.spec.nodes)
    each = settings.per_worker
    if is_ours(contestant.name):  # its batch does not change with the nodes
        each = settings.global_batch // len(nodes)
    attempt = Attempt(
        directory=directory,
        nodes=nodes,
        most_nodes=len(scenario.everyone.nodes),
        global_batch=each * len(nodes),
        per_worker=each,
        learning_rate=settings.learning_rate,
        elastic=scenario.elastic,
        small=settings.small,
    )
    for path in (attempt.journals, attempt.snapshots, attempt.logs):
        path.mkdir(parents=True, exist_ok=True)
    return attempt
