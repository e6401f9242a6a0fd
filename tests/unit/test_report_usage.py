"""What the members of a run have used of each node, from its log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.report.state import Tally
from raycloud.report.summary import summarize
from raycloud.report.summary_text import summary_text
from raycloud.report.usage import usage
from tests import logs


def told(cores: float = 0.5, gpu: float | None = None) -> Tally:
    """Two nodes; the members of `b` use a half of their cores, of `a` all of them."""
    tally = Tally()
    for member, node in enumerate("aab"):
        tally.apply(0.0, replace(logs.ready(member, node=f"node-{node}"), cores=cores))
    for step in range(2):
        for member, cpu_s in enumerate((1.0, 1.0, 0.5)):
            report = replace(
                logs.commit(member, step, step + 1, loss=1.0),
                wall_s=2.0,
                cpu_s=cpu_s,
                bytes_sent=4_000_000,
                memory_bytes=(3 - step) << 20,
                gpu_busy=gpu,
                gpu_bytes=0 if gpu is None else (5 + step) << 20,
            )
            tally.apply(1.0 + step, report)
    return tally


def test_of_all_and_of_each_node() -> None:
    whole, a, b = usage(told().used)
    assert (whole.node, a.node, b.node) == ("", "node-a", "node-b")
    assert (whole.members, a.members, b.members) == (3, 2, 1)
    assert (a.cpu, b.cpu) == (1.0, 0.5)
    assert whole.cpu == pytest.approx(5 / 6)
    assert (whole.gpu, whole.gpu_bytes, a.gpu) == (None, None, None)
    assert {one.memory_bytes for one in (whole, a, b)} == {3 << 20}  # the most of any moment
    assert (a.sent_bytes_per_s, b.sent_bytes_per_s) == (4e6, 2e6)
    assert whole.sent_bytes_per_s == 3e6


def test_who_does_not_say_its_cores_counts_for_nothing() -> None:
    assert [one.cpu for one in usage(told(cores=0.0).used)] == [None] * 3
    assert usage(Tally().used) == []


def test_gpus_are_busy_where_somebody_has_looked() -> None:
    found = {(one.gpu, one.gpu_bytes) for one in usage(told(gpu=0.75).used)}
    assert found == {(0.75, 6 << 20)}


def test_the_summary_says_it() -> None:
    found = summarize(told(gpu=0.75))
    assert [one["node"] for one in found.usage] == ["", "node-a", "node-b"]
    text = summary_text(found)
    assert "used" in text
    assert "processors 83% (node node-b least, 50%)" in text
    assert "GPUs 75%" in text
    assert "memory at most 3.1 MB a worker, 6.3 MB on its GPU" in text
