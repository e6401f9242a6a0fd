"""A member that has left, and is called back since others died: real members, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycloud.commands import Form, Meet
from raycloud.events import ChangeApplied, StepsCommitted
from tests.fellows import Fellows
from tests.tiers import variants
from tests.unit.test_recovery_catch_up import asked, check_end


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here they share a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("steps", variants(1, 3))
def test_it_has_no_part_in_what_the_others_did_since(steps: int, tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    fellows.form(Form(generation=0, members=(0, 1, 2), shares=(3, 3, 2), step=0))
    fellows.come_to(0, 2)
    fellows.prepare(1, Meet(generation=1, members=(0, 1), shares=(4, 4)), (0, 1, 2))
    fellows.until(ChangeApplied, (2,))
    left = fellows.of(ChangeApplied, 2)[0].step
    fellows.come_to(0, left + steps)
    fellows.form(Form(generation=2, members=(0, 2), shares=(4, 4), step=left, settled=1))
    check_end(fellows, job, (0, 2))
    told = [e for e in fellows.of(StepsCommitted, 2) if e.generation == 2]
    assert told[0].first_step >= left + steps
