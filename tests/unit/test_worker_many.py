"""Many members over real sockets: what holds of a few holds of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.commands import Form
from raycloud.events import ExchangeBroken
from tests.fellows import Fellows
from tests.unit.test_recovery_catch_up import asked, check_end

MANY, STEPS, LOST = 64, 50, 5


@pytest.mark.full(only="64 members over real sockets")
@pytest.mark.timeout(600)
def test_of_sixty_four_one_is_lost_and_the_result_is_that_of_one(tmp_path: Path) -> None:
    few = asked(tmp_path, steps=STEPS, global_batch=2 * MANY)
    job = few.model_copy(update={"settings": {**few.settings, "samples": 6 * MANY}})
    fellows = Fellows(tmp_path / "kept", job, MANY, joining=0)
    every = tuple(range(MANY))
    fellows.form(Form(generation=0, members=every, shares=(1,) * MANY, step=0))
    fellows.come_to(LOST + 1, STEPS // 2)
    fellows.members[LOST].abandon(1)
    left = tuple(member for member in every if member != LOST)
    fellows.until(ExchangeBroken, (LOST + 1,))
    fellows.form(Form(generation=1, members=left, shares=(2, *(1,) * (MANY - 2)), step=0))
    check_end(fellows, job, left, STEPS)
