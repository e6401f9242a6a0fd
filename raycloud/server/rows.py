"""Rows by id: where they lie, and what an update does to them. Plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raycloud.errors import InternalError
from raycloud.sync.tables import Ids, TableSpec, Values, initial, mixed

_EXPIRES = 64  # steps between two looks for rows that are forgotten, at most
_FIRST = 64  # places of an index, or rows, to begin with: a power of two


class IdIndex:
    """Numbers, from 0 on, for ids; many at once. Open addressing, by linear probing."""

    def __init__(self) -> None:
        self._begin(_FIRST)
        self.ids = np.empty(_FIRST, np.int64)  # by number
        self.count = 0

    def _begin(self, places: int) -> None:
        self._mask = np.uint64(places - 1)
        self._keys = np.zeros(places, np.int64)
        self._numbers = np.full(places, -1, np.int64)

    def _home(self, ids: Ids) -> npt.NDArray[np.int64]:
        return (mixed(ids.view(np.uint64)) & self._mask).astype(np.int64)

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The number of each; -1 where it has none."""
        found = np.full(len(ids), -1, np.int64)
        left, at = np.arange(len(ids)), self._home(ids)
        last = len(self._keys) - 1
        while len(left):
            numbers = self._numbers[at]
            hit = (numbers >= 0) & (self._keys[at] == ids[left])
            found[left[hit]] = numbers[hit]
            on = (numbers >= 0) & ~hit
            left, at = left[on], (at[on] + 1) & last
        return found

    def add(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Numbers for these, that have none and are unlike; they are the next ones."""
        wanted = self.count + len(ids)
        if wanted > len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty(wanted, np.int64)])
        if 2 * wanted > len(self._keys):
            places = len(self._keys)
            while 2 * wanted > places:
                places *= 2
            self._begin(places)
            self._place(self.ids[: self.count], np.arange(self.count))
        numbers = np.arange(self.count, wanted)
        self._place(ids, numbers)
        self.ids[self.count : wanted] = ids
        self.count = wanted
        return numbers

    def _place(self, ids: Ids, numbers: npt.NDArray[np.int64]) -> None:
        left, at = np.arange(len(ids)), self._home(ids)
        last = len(self._keys) - 1
        while len(left):
            free = self._numbers[at] < 0
            # Where several want one place, the last of them has it.
            self._keys[at[free]] = ids[left[free]]
            self._numbers[at[free]] = numbers[left[free]]
            on = self._numbers[at] != numbers[left]
            left, at = left[on], (at[on] + 1) & last


Update = Callable[[TableSpec, Mapping[str, Values], Any, Values], None]
"""Takes a spec, all rows and what is kept of them, numbers of rows, and a gradient for each."""


def _sgd(spec: TableSpec, held: Mapping[str, Values], at: Any, gradients: Values) -> None:
    rows = held["rows"]
    rows[at] = rows[at] * (1.0 - spec.rate * spec.weight_decay) - spec.rate * gradients


def _adagrad(spec: TableSpec, held: Mapping[str, Values], at: Any, gradients: Values) -> None:
    """Duchi et al., 2011: as torch.optim.Adagrad, but with weight decay apart from it."""
    rows, sums = held["rows"], held["squares"]
    new = sums[at] + gradients * gradients
    sums[at] = new
    step = gradients / (np.sqrt(new) + spec.epsilon)
    rows[at] = rows[at] * (1.0 - spec.rate * spec.weight_decay) - spec.rate * step


def _rowwise_adagrad(
    spec: TableSpec, held: Mapping[str, Values], at: Any, gradients: Values
) -> None:
    """The same with one sum a row, of its mean square (Naumov et al., 2019)."""
    rows, sums = held["rows"], held["square"]
    new = sums[at] + np.mean(gradients * gradients, axis=1)
    sums[at] = new
    step = gradients / (np.sqrt(new) + spec.epsilon)[:, None]
    rows[at] = rows[at] * (1.0 - spec.rate * spec.weight_decay) - spec.rate * step


def _adamw(spec: TableSpec, held: Mapping[str, Values], at: Any, gradients: Values) -> None:
    """Loshchilov and Hutter, 2019; a row's moments and count of steps are of its own updates."""
    rows, (first, second) = held["rows"], spec.betas
    count = held["count"][at] + 1.0
    mean = first * held["mean"][at] + (1.0 - first) * gradients
    square = second * held["squares"][at] + (1.0 - second) * gradients * gradients
    held["count"][at], held["mean"][at], held["squares"][at] = count, mean, square
    root = np.sqrt(square / (1.0 - second**count)[:, None]) + spec.epsilon
    step = mean / (1.0 - first**count)[:, None] / root
    rows[at] = rows[at] * (1.0 - spec.rate * spec.weight_decay) - spec.rate * step


_KEPT: dict[str, tuple[Update, tuple[str, ...]]] = {  # what is kept of each row, beside it
    "sgd": (_sgd, ()),
    "adagrad": (_adagrad, ("squares",)),
    "rowwise_adagrad": (_rowwise_adagrad, ("square",)),
    "adamw": (_adamw, ("mean", "squares", "count")),
}
OPTIMIZERS = tuple(_KEPT)
_SINGLE = {"square", "count"}  # those of one value a row
_WAITING = "waiting", "named"  # ids that have no row yet, and how many steps have named them


class Table:
    """The rows of a table that a shard has, and what its optimizer keeps of them.

    The newest update can be taken back.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._update, kept = _KEPT[spec.optimizer]
        self._index, self._waiting = IdIndex(), IdIndex()
        self._named = np.zeros(0, np.int64)  # steps that have named an id that has no row
        self._counted = np.zeros(0, np.int64)  # of these, by the newest update
        self._held: dict[str, Values] = {}
        self._used = np.zeros(0, np.int64)  # the newest step that named a row
        for name in ("rows", *kept):
            shape = (0,) if name in _SINGLE else (0, spec.width)
            self._held[name] = np.zeros(shape, spec.dtype)
        self._before: dict[str, Values] = {}
        self._changed = np.zeros(0, np.int64)  # numbers of rows, rising

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self._index.count

    def read(self, ids: Ids) -> Values:
        """Rows of these ids, shape (ids, width); those that have none are as they would begin."""
        numbers = self._index.find(ids)
        known = numbers >= 0
        rows = self._held["rows"]
        if known.all():
            return rows[numbers]
        found = np.empty((len(ids), self.spec.width), self.spec.dtype)
        found[known] = rows[numbers[known]]
        found[~known] = initial(self.spec, ids[~known])
        return found

    def apply(self, ids: Ids, gradients: Values, step: int) -> None:
        """Update the rows of these ids, that are unlike; new ones begin."""
        ids, gradients = self._admitted(ids, gradients)
        numbers = self._index.find(ids)
        if (new := numbers < 0).any():
            numbers[new] = self._index.add(ids[new])
            self._make_room()
            self._held["rows"][numbers[new]] = initial(self.spec, ids[new])
        order = np.argsort(numbers)
        self._changed = numbers[order]
        self._before = {name: held[self._changed] for name, held in self._held.items()}
        self._used[self._changed] = step
        if len(ids):
            self._update(self.spec, self._held, self._changed, gradients[order])

    def take_back(self) -> None:
        """All rows are as before the newest update; those that began with it are as they began."""
        for name, values in self._before.items():
            self._held[name][self._changed] = values
        self._named[self._counted] -= 1
        self.settle()

    def settle(self) -> None:
        """The newest update cannot be taken back any more."""
        self._before, self._changed = {}, np.zeros(0, np.int64)
        self._counted = np.zeros(0, np.int64)

    def _admitted(self, ids: Ids, gradients: Values) -> tuple[Ids, Values]:
        """Those that have rows, or have been named often enough to have one now."""
        self._counted = np.zeros(0, np.int64)
        if self.spec.admit_after <= 1 or not len(ids):
            return ids, gradients
        strange = np.flatnonzero(self._index.find(ids) < 0)
        numbers = self._waiting.find(ids[strange])
        if (new := numbers < 0).any():
            numbers[new] = self._waiting.add(ids[strange[new]])
            more = np.zeros(self._waiting.count - len(self._named), np.int64)
            self._named = np.concatenate([self._named, more])
        self._named[numbers] += 1
        self._counted = numbers
        stays = np.ones(len(ids), bool)
        stays[strange[self._named[numbers] < self.spec.admit_after]] = False
        return ids[stays], gradients[stays]

    def _make_room(self) -> None:
        have = len(self._used)
        if self.count <= have:
            return
        room = max(self.count, have + have // 2, _FIRST)
        self._used = _longer(self._used, room)
        self._held = {name: _longer(held, room) for name, held in self._held.items()}

    def expire(self, step: int) -> bool:
        """Forget rows that no step of the last `expire_steps` has named, every so many steps.

        And, as often as that, who is still to be named often enough. Returns whether anything is
        forgotten: the newest update cannot be taken back then.
        """
        after = self.spec.expire_steps
        if after is None:
            return False
        every = max(1, min(_EXPIRES, after // 4))
        if step % every:
            return False
        forgets = step % (-(-after // every) * every) == 0 and self._waiting.count > 0
        if forgets:
            self._waiting, self._named = IdIndex(), np.zeros(0, np.int64)
            self.settle()
        stays = self._used[: self.count] >= step - after
        if stays.all():
            return forgets
        waiting = {*_WAITING}
        kept = {n: v if n in waiting else v[stays] for n, v in self.arrays().items()}
        self.load(kept)
        return True

    def arrays(self) -> dict[str, Values]:
        """All of it by name: `ids`, `used`, `rows`, what is kept beside them, and who waits."""
        held = {name: value[: self.count].copy() for name, value in self._held.items()}
        ids, used = self._index.ids[: self.count].copy(), self._used[: self.count].copy()
        waiting = self._waiting.ids[: self._waiting.count].copy(), self._named.copy()
        return {"ids": ids, "used": used, **held, **dict(zip(_WAITING, waiting, strict=True))}

    def load(self, arrays: Mapping[str, Values]) -> None:
        """Have these rows and no others.

        Raises:
            InternalError: They are of another table.
        """
        names = {"ids", "used", *_WAITING, *self._held}
        if set(arrays) != names:
            raise InternalError(f"{self.spec.name} has {sorted(names)}, not {sorted(arrays)}")
        for name, held in self._held.items():
            if arrays[name].shape != (len(arrays["ids"]), *held.shape[1:]):
                raise InternalError(f"{name} of {self.spec.name} has shape {arrays[name].shape}")
        self._index, self._waiting = IdIndex(), IdIndex()
        self._index.add(arrays["ids"])
        self._waiting.add(arrays[_WAITING[0]])
        self._named = arrays[_WAITING[1]].copy()
        self._used = arrays["used"].copy()
        self._held = {name: arrays[name].astype(self.spec.dtype) for name in self._held}
        self.settle()


def _longer(values: Values, room: int) -> Values:
    more = np.zeros((room - len(values), *values.shape[1:]), values.dtype)
    return np.concatenate([values, more])
