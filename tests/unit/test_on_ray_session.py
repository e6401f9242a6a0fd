"""What a run tells control before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from raycloud.on_ray.session import begins_together
from tests.lockstep import job

RANGE = {"min_workers": 1, "max_workers": 2}


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, False),
        ({"elastic": {**RANGE, "shares": "equal"}}, True),
        ({"data": {"refresh": True}}, True),
        ({"sync": {"tour": "auto"}}, True),
    ],
)
def test_nobody_may_be_late_where_that_would_show(changes: dict[str, Any], together: bool) -> None:
    assert begins_together(job(**{"elastic": RANGE} | changes)) is together
