"""Runs one contestant in one scenario once, and says what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import journal
from benchmarks.racing.contestant import Attempt, Contestant, environment
from benchmarks.racing.measures import Observation, node_rates
from benchmarks.racing.registry import SUMMED
from benchmarks.racing.results import is_ours
from benchmarks.racing.running import BROKEN, EndedError, Race
from benchmarks.racing.target import EvaluationError, Evaluator, read_losses
from benchmarks.testbed import Testbed

if TYPE_CHECKING:
    from benchmarks.racing.meters import Used
    from benchmarks.racing.scenarios import Scenario, Settings

_FINISH_S = 300.0  # for the snapshots that are left to evaluate: all, where a run ended early
_LAST_STEPS_S = 30.0
_REASON_CHARACTERS = 300
_TESTBED, _EVALUATOR = "testbed: ", "evaluator: "
NOT_ITS_OWN = (_TESTBED, _EVALUATOR)  # what is in a reason that is no contestant's


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of one run.

    Attributes:
        observation: What is measured from.
        used: What its window cost; None where it had none.
        not_done: Events that found nobody, in words.
        congestion_control: What TCP went by: `cubic`, `bbr`.
    """

    observation: Observation
    used: Used | None
    not_done: tuple[str, ...]
    congestion_control: str


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The limit.

    Attributes:
        by_node: Samples per second of every node, all computing at once without exchange.
        failed: Why they are not known; empty where they are.
    """

    by_node: Mapping[str, float]
    failed: str = ""


@contextlib.contextmanager
def place_for(keep: Path | None, name: str) -> Iterator[Path]:
    """An empty directory with a short path, for sockets have room for 107 bytes.

    Args:
        keep: Where its logs and journals are copied at the end; None: nowhere.
        name: Under which.
    """
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as place:
        path = Path(place)
        try:
            yield path
        finally:
            if keep is not None:
                _copy(path, keep / name)


def _copy(path: Path, kept: Path) -> None:
    """Copy what people look at: logs, journals, and the events of a run of ours."""
    kinds = ("logs/**/*", "journals/*", "losses*", "**/run/events.jsonl")
    for file in itertools.chain.from_iterable(path.glob(kind) for kind in kinds):
        if file.is_file():
            copy = kept / file.relative_to(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


def race(contestant: Contestant, scenario: Scenario, settings: Settings, directory: Path) -> Seen:
    """Run a contestant that is prepared.

    Args:
        contestant: Whom.
        scenario: In what.
        settings: How.
        directory: An empty one with a short path; all that is written goes there.

    Raises:
        MissingError: There can be no testbed here.
        ClusterError: Ray does not come up on it. This and the other errors of a testbed (`BROKEN`)
            are the observation's `failed` once the contestant has been started.
    """
    attempt = _attempt(contestant, scenario, settings, directory)
    losses = directory / "losses.jsonl"
    evaluator = Evaluator(
        attempt.snapshots, losses, small=settings.small, environment=environment(attempt)
    )
    runs: list[Race] = []
    failed: list[str] = []
    control = ""
    try:
        try:
            with Testbed(scenario.spec) as bed:
                control = bed.congestion_control
                run = _run_of(bed, contestant, scenario, settings, attempt)
                runs.append(run)
                failed += _train(run, evaluator)
        except BROKEN as error:
            if not runs or not runs[0].processes:
                raise
            failed.append(f"{_TESTBED}{error}")
        if settings.target_loss is not None:  # the rest of them, now that the testbed is gone
            evaluator.finish(_FINISH_S)
    except EvaluationError as error:
        failed.append(f"{_EVALUATOR}{error}")
    finally:
        evaluator.close()
    (run,) = runs
    observation = Observation(
        t0_s=run.t0_s,
        window=run.window,
        journals=journal.read(attempt.journals),
        faults=tuple(run.faults),
        changes=tuple(run.changes),
        sent_bytes=run.used.sent_bytes if run.used else 0,
        trunk_bytes=run.used.trunk_bytes if run.used else 0,
        losses=read_losses(losses, attempt.snapshots),
        target_loss=settings.target_loss,
        summed=contestant.name in SUMMED,
        failed="; ".join(failed)[:_REASON_CHARACTERS],
    )
    return Seen(
        observation=observation,
        used=run.used,
        not_done=tuple(run.not_done),
        congestion_control=control,
    )


def _train(run: Race, evaluator: Evaluator) -> list[str]:
    """From the start to the target, or why it ended before."""
    try:
        run.start()
        run.warm_up()
        run.measure()
        if run.settings.target_loss is not None:
            evaluator.start()  # not before: it takes time from the nodes
            run.until_target(evaluator.losses)
    except EndedError as error:
        return [str(error)]
    finally:
        run.close()
    return []


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
        ClusterError: As by `race`.
    """
    alone = dataclasses.replace(scenario, spec=scenario.everyone, events=())
    attempt = _attempt(contestant, alone, settings, directory)
    runs: list[Race] = []
    try:
        with Testbed(alone.spec) as bed:
            run = _run_of(bed, contestant, alone, settings, attempt)
            runs.append(run)
            start_s, end_s = _compute(run)
    except EndedError as error:
        return Speeds(by_node={}, failed=str(error)[:_REASON_CHARACTERS])
    except BROKEN as error:
        if not runs or not runs[0].processes:
            raise
        return Speeds(by_node={}, failed=f"{_TESTBED}{error}"[:_REASON_CHARACTERS])
    return Speeds(by_node=node_rates(journal.read(attempt.journals), start_s, end_s))


def _compute(run: Race) -> tuple[float, float]:
    """First and last second of the limit's window."""
    settings, everyone = run.settings, set(run.attempt.nodes)
    try:
        run.start()
        run.wait(
            lambda: run.begun() == everyone,
            run.t0_s + settings.first_update_limit_s,
            "not every node has computed an update",
        )
        start_s = run.pass_time(settings.limit_warm_up_s)
        end_s = run.pass_time(settings.limit_window_s)
        run.wait(  # for the steps that the end has cut
            lambda: run.begun(end_s) == everyone, end_s + _LAST_STEPS_S, "not every step"
        )
    finally:
        run.close()
    return start_s, end_s


def _run_of(
    bed: Testbed, contestant: Contestant, scenario: Scenario, settings: Settings, attempt: Attempt
) -> Race:
    return Race(
        bed=bed, contestant=contestant, scenario=scenario, attempt=attempt, settings=settings
    )


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
