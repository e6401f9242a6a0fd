"""Servers of rows that die at any word, and members that die at any point of a step, by seeds.

Each shard has a copy. A server ends just before it does what it was told, or just after, before it
has said so; it is started again without rows, and filled. Whatever is lost on the way is told
again, and counts once: the result is that of a single process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloud.checkpoint import open_store
from raycloud.errors import TransportError
from raycloud.server.serving import Server
from tests.live import wait_for
from tests.looked import TABLE
from tests.tiers import variants
from tests.unit.test_step_tables import OPEN, Served

STEPS = 14
SHARDS = 2
WORDS = 12  # of a step, about: after how many a server dies


class Mortal(Server):
    """A server that ends at a word.

    Attributes:
        left: Words until then; None: it does not.
        acts: Whether it does what that word says, and cannot say so any more.
        met: The word.
    """

    left: int | None = None
    acts = False
    met = ""

    def _reply(self, header: Mapping[str, Any], arrays: Any) -> Any:
        if (left := self.left) is not None:
            self.left = left - 1
            if left <= 0 and not self.met:
                self.met = str(header.get("do"))
                if self.acts:
                    super()._reply(header, arrays)
                self.close()
            if self.met:
                raise TransportError("its machine is gone")
        return super()._reply(header, arrays)


class Field:
    """Shards with copies, members of them, and what happens to both.

    Args:
        place: For checkpoints.
        chance: Decides.
    """

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.place, self.chance = place, chance
        self.every: list[Mortal] = []
        sides = [[self.started(at) for at in range(SHARDS)] for _ in range(2)]
        shares = chance.choice([[8], [5, 3], [4, 2, 2]])
        self.fleet = Served(sides[0], shares, sides[1])
        self.deaths: list[str] = []

    def started(self, at: int) -> Mortal:
        """One of a shard, without rows."""
        self.every.append(Mortal(at, SHARDS, open_store(self.place), "127.0.0.1"))
        return self.every[-1]

    def go(self, number: int) -> None:
        """One step, which a server may end in; and then again, with one that was started anew."""
        fleet, chance = self.fleet, self.chance
        doomed = None
        if chance.random() < 0.5:
            doomed = chance.choice([*fleet.servers, *fleet.copies])
            doomed.acts = chance.random() < 0.5
            doomed.left = chance.randrange(WORDS)
        elif len(fleet.shares) > 1 and chance.random() < 0.3:
            during = chance.choice(["lane", "gradients", "after"])
            fleet.lose(chance.randrange(len(fleet.shares)), number, during=during)
            fleet.number = number + 1
            self.deaths.append(f"a member, {during}")
            return
        try:
            fleet.step(number)
        except TransportError:
            assert doomed is not None
            for replica in fleet.replicas:
                replica.suspend()
                replica.discard()  # what is kept, others in this test compute again
            self.replace(doomed)
            fleet.step(number)
        if doomed is not None and doomed in (*fleet.servers, *fleet.copies):
            # Nobody waits for what is said of the step's last word.
            wait_for("its words", lambda: doomed.met or doomed.shard.step == number + 1)
            doomed.left = None
            if doomed.met:
                self.replace(doomed)

    def replace(self, dead: Mortal) -> None:
        """A generation without it, in which another one in its place is filled."""
        fleet = self.fleet
        self.deaths.append(f"{dead.met}, {'done' if dead.acts else 'not done'}")
        for side in (fleet.servers, fleet.copies):
            for at, one in enumerate(side):
                if one is dead:
                    side[at] = new = self.started(at)  # type: ignore[index] # they are lists
        fleet.join(fleet.replicas, fleet.shares)
        wait_for("the rows", lambda: new._filling is None and TABLE in new.shard.tables)

    def close(self) -> None:
        """End all."""
        while OPEN:
            OPEN.pop().close()
        for one in self.every:
            one.close()


@pytest.fixture
def field(tmp_path: Path, seed: int) -> Iterator[Field]:
    one = Field(tmp_path, random.Random(seed))
    yield one
    one.close()


@pytest.mark.parametrize("seed", variants(*range(100), fast=6))
def test_what_is_told_counts_once_whoever_dies(field: Field, seed: int) -> None:
    for number in range(STEPS):
        field.go(number)
    assert field.deaths
    assert field.fleet.apart(STEPS) <= 1e-9, (seed, field.deaths)
    servers = [*field.fleet.servers, *field.fleet.copies]
    wait_for("the last word", lambda: all(one.shard.step == STEPS for one in servers))
    for one, other in zip(field.fleet.servers, field.fleet.copies, strict=True):
        rows, same = dict(one.shard.arrays()), dict(other.shard.arrays())
        assert rows.keys() == same.keys()
        assert all(np.array_equal(rows[name], same[name]) for name in rows)
