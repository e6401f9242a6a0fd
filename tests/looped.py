"""Loops of any task, each in a thread of its own, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from raycloud.order import Position
from raycloud.spec import Job
from tests.lockstep import NetTask
from tests.poisoned import Looped
from tests.sockets import gloo_members, together


def looped(
    root: Path,
    asked: Job,
    build: Callable[[], NetTask],
    shares: tuple[int, ...],
    steps: int,
) -> list[Looped]:
    """Members that have tried their task out, and computed so many steps together."""
    made = [Looped(root, asked, build(), steps) for _ in shares]
    for one in made:
        first = one.parts.steps.span(0, Position()).micro_batches[0]
        one.replica.try_out(one.parts.collate.one(first))
    with gloo_members(len(shares)) as gradients, gloo_members(len(shares)) as lanes:
        several = zip(made, gradients, lanes, strict=True)
        assert all(together(partial(one.run, g, lane, shares) for one, g, lane in several))
    return made
