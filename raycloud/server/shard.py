"""A shard: part of all tables' rows, changed by one transaction for each step. Pure.

Members push what a step's samples say of rows, and wait until it is taken, before they have their
part in the step's exchange. So where that is through at any of them, all has come, and whoever
commits the step says so to the shard, which then changes its rows. Words of an older generation
count no more. A member may have committed a step and be lost with it: the next generation goes on
with that step, and the shard takes it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum

import numpy as np

from raycloud.errors import InternalError
from raycloud.server.rows import Table
from raycloud.sync.tables import Ids, TableSpec, Values, summed

Rows = tuple[Ids, Values]
Gradients = Mapping[str, Rows]  # by table


class Answer(StrEnum):
    """What became of what was said."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    OLD_TERM = "old term"


class Shard:
    """Rows of tables, and where they stand.

    Attributes:
        step: Steps that are committed, or passed over: the next one.
        generation: The newest that it has heard of.
        by: The generation that decided the step before; -1: it was loaded.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.step = self.generation = 0
        self.by = -1
        self._undoes = False  # whether the step before can be taken back
        self._pushed: dict[tuple[int, int], dict[int, Gradients]] = {}
        self._sums: tuple[tuple[int, int], dict[str, Rows]] | None = None
        self._squares: dict[tuple[int, int], float] = {}  # of this step and the one before

    def open(self, spec: TableSpec) -> None:
        """Have a table, if it is not there.

        Raises:
            InternalError: It is there, and is another one.
        """
        table = self.tables.setdefault(spec.name, Table(spec))
        if table.spec != spec:
            raise InternalError(f"a table is {asdict(table.spec)}, and not {asdict(spec)}")

    def stands(self, step: int) -> bool:
        """Whether a generation can go on with this step."""
        return step == self.step or (step == self.step - 1 and self._undoes)

    def enter(self, generation: int, step: int) -> Answer:
        """A generation goes on with `step`: words of older ones count no more.

        Raises:
            InternalError: It does not stand there.
        """
        if generation < self.generation:
            return Answer.OLD_TERM
        if generation == self.generation and step < self.step:  # another member was first
            return Answer.DUPLICATE
        if not self.stands(step):
            raise InternalError(f"step {step} was to be gone on with, and rows are of {self.step}")
        if step < self.step:
            for table in self.tables.values():
                table.take_back()
            self.step, self._undoes = step, False
        self.generation, self._sums = generation, None
        self._pushed = {key: of for key, of in self._pushed.items() if key[1] >= generation}
        return Answer.APPLIED

    def push(self, step: int, generation: int, rank: int, gradients: Gradients) -> Answer:
        """What the samples of one member say; it is kept until the step is decided."""
        if generation < self.generation:
            return Answer.OLD_TERM
        of_step = self._pushed.setdefault((step, generation), {})
        if rank in of_step or step < self.step:
            return Answer.DUPLICATE
        of_step[rank] = gradients
        return Answer.APPLIED

    def square(self, step: int, generation: int) -> float:
        """The sum of the squares of the step's gradients, before they are scaled.

        All members ask, and the last of them may do so after the first has decided the step.

        Raises:
            InternalError: The step is decided, and nobody had asked before.
        """
        key = step, generation
        if key not in self._squares:
            if step != self.step:
                raise InternalError(
                    f"step {step} was asked for, and the rows are as of {self.step}"
                )
            sums = self._summed(step, generation).values()
            found = float(sum(np.sum(np.square(g, dtype=np.float64)) for _, g in sums))
            self._squares = {k: v for k, v in self._squares.items() if k[0] >= step - 1}
            self._squares[key] = found
        return self._squares[key]

    def decide(self, step: int, generation: int, scale: float) -> Answer:
        """The step counts, its gradients times `scale`; 0: it changes nothing.

        Raises:
            InternalError: Steps before it are not decided.
        """
        if generation < self.generation:
            return Answer.OLD_TERM
        if step < self.step:
            return Answer.DUPLICATE
        if step > self.step:
            raise InternalError(f"step {step} is decided, and the rows are as of {self.step}")
        sums = self._summed(step, generation) if scale else {}
        for name, table in self.tables.items():
            ids, gradients = sums.get(name, (np.zeros(0, np.int64), None))
            if gradients is None:
                table.settle()
            else:
                table.apply(ids, gradients * np.asarray(scale, gradients.dtype), step)
        self.step, self.by, self.generation = step + 1, generation, generation
        self._undoes, self._sums = True, None
        self._pushed = {key: of for key, of in self._pushed.items() if key[0] > step}
        self._expire()
        return Answer.APPLIED

    def read(self, name: str, ids: Ids, step: int) -> Values:
        """Rows of these ids for `step`: as all steps before it have left them.

        Raises:
            InternalError: The rows stand elsewhere.
        """
        if step != self.step:
            raise InternalError(f"rows were asked for as of step {step}, and are of {self.step}")
        return self.tables[name].read(ids)

    def _summed(self, step: int, generation: int) -> dict[str, Rows]:
        """By table, the sums over all members, added in the order of their ranks."""
        key = step, generation
        if self._sums is not None and self._sums[0] == key:
            return self._sums[1]
        of_step = sorted(self._pushed.get(key, {}).items())
        sums: dict[str, Rows] = {}
        for name in self.tables:
            own = [given[name] for _, given in of_step if name in given]
            if own:
                ids = np.concatenate([one for one, _ in own])
                sums[name] = summed(ids, np.concatenate([one for _, one in own]))
        self._sums = key, sums
        return sums

    def _expire(self) -> None:
        for table in self.tables.values():
            self._undoes = not table.expire(self.step) and self._undoes

    def arrays(self) -> Iterator[tuple[str, Values]]:
        """All of it: arrays by `<table>/<name>`. Copies."""
        for name, table in self.tables.items():
            for key, value in table.arrays().items():
                yield f"{name}/{key}", value

    def load(self, step: int, arrays: Mapping[str, Values], by: int = -1) -> None:
        """Stand before `step` with these rows, and no others; `by` decided the step before.

        Raises:
            InternalError: They are of other tables.
        """
        strange = {name.rpartition("/")[0] for name in arrays} - self.tables.keys()
        if strange:
            raise InternalError(f"there is no table {min(strange)!r}")
        for name, table in self.tables.items():
            begin = f"{name}/"
            own = {k.removeprefix(begin): v for k, v in arrays.items() if k.startswith(begin)}
            table.load(own or Table(table.spec).arrays())
        self.step, self.by, self._undoes = step, by, False
        self._pushed, self._sums, self._squares = {}, None, {}
