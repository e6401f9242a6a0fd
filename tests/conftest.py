"""What all tests share: a test's kind is its folder, and hypothesis draws alike for everyone."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tiers import EXAMPLES

TESTS = Path(__file__).parent
RAY_TIMEOUT_S = 180  # an embedded cluster starts in 3 to 6 s on an idle machine, not on a busy one

# Tensors are small here: a second thread has nothing to do but wait, which takes 10 times as long
# on a busy machine. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The driver's device, not torch: a process that only collects need not load it.
collect_ignore = [] if Path("/dev/nvidiactl").exists() else ["gpu"]

# A shell ignores Ctrl-C in what it starts in the background, and all that is started from there
# inherits that: commands under test would not hear theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline per example: this machine may be busy. No database: a checkout may be read-only, and a
# failure prints what reproduces it.
settings.register_profile(
    "ours",
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("ours")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder it stands in; doctests stand with the code and are `unit`."""
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else "unit"
        if kind.endswith(".py"):
            raise pytest.UsageError(f"{item.path}: a test stands in a folder, which is its kind")
        item.add_marker(kind)
        if item.get_closest_marker("ray") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RAY_TIMEOUT_S))
        # `make test` looks for it there.
        if item.get_closest_marker("alone") and kind not in {"ray", "testbed"}:
            raise pytest.UsageError(f"{item.path}: only those with a Ray or a testbed are `alone`")


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here members share a process."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fellows() -> Iterator[None]:
    """Members in threads of this process end with their test."""
    yield
    if (fellows := sys.modules.get("tests.fellows")) is not None:
        fellows.end_all()


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """A command that was asked to stop ignores SIGTERM from then on: not those of other tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
