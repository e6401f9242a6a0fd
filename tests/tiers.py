"""The two tiers: what `make test` runs, and what besides only `make test-all` does.

A test that is marked `full` runs in the full tier alone. A property runs in both, with fewer
examples in the fast one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

FULL = os.environ.get("RAYCLOUD_TESTS") == "full"  # set by `make test-all`
FEWEST = 25  # examples of a property in the fast tier; none has fewer unless it has fewer in both
SHARE = 2  # else one in this many


def drawn(many: int) -> int:
    """How many examples this tier draws of those that the full one draws."""
    return many if FULL else min(many, max(FEWEST, many // SHARE))


EXAMPLES = drawn(50)  # of a property that says nothing of its own


def examples(many: int, **more: Any) -> settings:
    """The settings of a property that draws as many examples in the full tier."""
    return settings(max_examples=drawn(many), **more)


def variants(*values: Any, fast: int = 1) -> list[Any]:
    """Values to parametrize a test with, of which only the first `fast` are in the fast tier.

    A tuple is a case of a test with several arguments.
    """
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*case, marks=[] if number < fast else pytest.mark.full)
        for number, case in enumerate(cases)
    ]
