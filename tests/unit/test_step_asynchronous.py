"""What members that exchange by servers cannot do is refused as the model is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raycloud.clock import SystemClock
from raycloud.errors import TaskError
from raycloud.step.replica import Replica
from tests.lockstep import NetTask, job


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"norm": True, "double": False}, "'norm.num_batches_tracked' first, which workers"),
        ({"double": True}, "'first.weight' is of torch.float64, and servers hold fp32"),
    ],
)
def test_what_servers_cannot_hold_is_refused(given: dict[str, Any], says: str) -> None:
    asked = job(sync={"topology": "servers", "staleness": 2}, servers=2)
    with pytest.raises(TaskError, match=says) as refused:
        Replica(asked, NetTask(**given), device=torch.device("cpu"), steps=8, clock=SystemClock())
    assert "another sync.topology" in refused.value.hint
