"""Beds for the tests: real ones, of which nothing may be left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from benchmarks import testbed
from tests.testbed.remains import remains

MakeBed = Callable[..., testbed.Testbed]


@pytest.fixture(autouse=True)
def ground() -> None:
    """Skip where there can be no testbed."""
    if why := testbed.missing():
        pytest.skip(why)


@pytest.fixture
def make_bed(ground: None) -> Iterator[MakeBed]:
    """Makes a bed of nodes and trunks that lasts as long as the test; then proves it gone."""
    beds: list[testbed.Testbed] = []
    with contextlib.ExitStack() as stack:

        def make(
            *nodes: testbed.NodeSpec, trunks: tuple[testbed.TrunkSpec, ...] = ()
        ) -> testbed.Testbed:
            spec = testbed.Spec(nodes=nodes, trunks=trunks)
            beds.append(stack.enter_context(testbed.Testbed(spec)))
            return beds[-1]

        yield make
        pids = {bed.id: _processes(bed) for bed in beds}
    assert [remains(bed.id, pids[bed.id]) for bed in beds] == [[] for _ in beds]


def _processes(bed: testbed.Testbed) -> list[int]:
    return [pid for machine in (bed.head, *bed.nodes.values()) for pid in machine.processes()]
