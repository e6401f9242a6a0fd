"""A run under faults on a standing cluster of several nodes: actors there do the harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from raycloud.events import Event
from raycloud.faults import Action, Fault
from raycloud.on_ray.chaos import Chaos, prepared
from raycloud.spec import Job
from tests.live import asked
from tests.ray.test_leaving import nodes  # noqa: F401 - a fixture

FAULTS = (
    Fault(action=Action.KILL, at_step=20),
    Fault(action=Action.CUT, at_step=21, rank=1),
    Fault(action=Action.FREEZE, at_step=60, seconds=0.3),
)


@contextlib.contextmanager
def unseen(_: Job) -> Iterator[Callable[[Event], None]]:
    yield lambda _: None


@pytest.mark.full(only="faults are injected on several nodes")
@pytest.mark.timeout(300)
def test_workers_of_several_nodes_are_harmed(
    nodes: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    settings = {"gate": str(tmp_path / "gate")}  # which never opens
    job = prepared(asked("Paced", 3, elastic=elastic, settings=settings), steps=120)
    said: list[str] = []
    address = ray.get_runtime_context().gcs_address
    outcome = Chaos(tmp_path / "out", address, said.append, unseen).run(job, FAULTS)
    assert [(hit.fault.action, hit.why) for hit in outcome.hits] == [
        (fault.action, "") for fault in FAULTS
    ], said
    assert outcome.left == ()
    assert outcome.proved
    assert len(outcome.disturbed.pauses) >= 1
    assert outcome.pause_of(outcome.hits[0]) is not None
