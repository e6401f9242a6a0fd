"""A shard under members that repeat themselves, die with a step that only they have committed, and
come back with words of old generations: each step's gradients count once, whoever says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloud.server.shard import Answer, Shard
from raycloud.sync.tables import TableSpec, initial

SPEC = TableSpec(name="t", width=2, optimizer="sgd", rate=1.0, dtype="float64")
IDS = np.arange(6)


@dataclass
class Members:
    """Members of a job, who commit its steps; `rows` is what comes of those that count."""

    draw: st.DataObject
    shard: Shard = field(default_factory=Shard)
    generation: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.shard.open(SPEC)
        self.rows = initial(SPEC, IDS)

    def say_old_words(self) -> None:
        """What nobody may hear: of a generation that is over, or said before."""
        if self.generation and self.draw.draw(st.booleans()):
            told = {"t": (IDS, np.full((6, 2), 100.0))}
            old = self.shard.push(self.step, self.generation - 1, 0, told)
            assert old is Answer.OLD_TERM
            assert self.shard.decide(self.step, self.generation - 1, 1.0) is Answer.OLD_TERM
        if self.step and self.draw.draw(st.booleans()):
            said = self.shard.decide(self.step - 1, self.generation, 1.0)
            assert said is Answer.DUPLICATE

    def push(self) -> np.ndarray:
        """Each member tells its part, some twice; the sum."""
        total = np.zeros((6, 2))
        for rank in range(self.draw.draw(st.integers(1, 3))):
            ids = np.array(sorted(self.draw.draw(st.sets(st.integers(0, 5)))), np.int64)
            gradients = np.array([[float(rank + 1), float(one)] for one in ids]).reshape(-1, 2)
            told = {"t": (ids, gradients)}
            assert self.shard.push(self.step, self.generation, rank, told) is Answer.APPLIED
            if self.draw.draw(st.booleans()):
                again = self.shard.push(self.step, self.generation, rank, told)
                assert again is Answer.DUPLICATE
            total[ids] += gradients
        return total

    def commit(self) -> None:
        """A step, which some generations may break, each after one member has committed it."""
        while True:
            self.say_old_words()
            total = self.push()
            scale = self.draw.draw(st.sampled_from([0.0, 0.5, 1.0]))
            square = self.shard.square(self.step, self.generation)
            assert np.isclose(square, (total**2).sum())
            if not self.draw.draw(st.booleans()):
                break
            if self.draw.draw(st.booleans()):  # by one that is lost then
                assert self.shard.decide(self.step, self.generation, scale) is Answer.APPLIED
            self.generation += 1
            assert self.shard.stands(self.step)
            assert self.shard.enter(self.generation, self.step) is Answer.APPLIED
            assert np.allclose(self.shard.read("t", IDS, self.step), self.rows)
        for _ in range(2):  # members say it one after the other
            self.shard.decide(self.step, self.generation, scale)
            assert self.shard.square(self.step, self.generation) == square
        self.rows = self.rows - scale * total
        self.step += 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_step_counts_once(data: st.DataObject) -> None:
    members = Members(data)
    for _ in range(data.draw(st.integers(1, 6))):
        members.commit()
        assert members.shard.step == members.step
        assert np.allclose(members.shard.read("t", IDS, members.step), members.rows)
        copy = Shard()
        copy.open(SPEC)
        copy.load(members.step, dict(members.shard.arrays()))
        assert np.allclose(copy.read("t", IDS, members.step), members.rows)
