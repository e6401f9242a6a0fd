"""The digest of what preprocessing reads: values of all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycloud.data.digest import code_digest
from raycloud.errors import TaskError
from raycloud.task import Task


class Plain(Task):
    model = data = loss = optimizer = None  # type: ignore[assignment]


def test_rows_as_they_are_read() -> None:
    assert code_digest(Plain()) == "as-read"  # type: ignore[abstract]


class Reading(Task):
    model = data = loss = optimizer = None  # type: ignore[assignment]

    def __init__(self, held: object) -> None:
        self.held = held

    def preprocess(self, rows: Any) -> Any:
        return self.held and rows


def reading(held: object) -> str:
    return code_digest(Reading(held))  # type: ignore[abstract]


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (1, 1, 2),
        (1, 1, True),
        (1, 1, 1.0),
        (1, 1, "1"),
        (b"a", b"a", "a"),
        (float("nan"), float("nan"), 0.0),
        ([1, 2], [1, 2], [2, 1]),
        ([1, 2], [1, 2], (1, 2)),
        ([[1], 2], [[1], 2], [[1, 2]]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        ({3, 1, 2}, {1, 2, 3}, {1, 2}),
        (Path("a"), Path("a"), Path("b")),
        (np.float32(1), np.float32(1), np.float64(1)),
        (np.array(["a", None], object), np.array(["a", None], object), np.array(["b"], object)),
        (np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((3, 2))),
        (pa.int32(), pa.int32(), pa.int64()),
        (pa.table({"x": [1]}), pa.table({"x": [1]}), pa.table({"x": [2]})),
        (Slotted(1), Slotted(1), Slotted(2)),
        (len, len, max),
        (np.add, np.add, np.multiply),
        (lambda x: x + 1, lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_values(value: object, same: object, other: object) -> None:
    assert reading(value) == reading(same)
    assert reading(value) != reading(other)


def test_a_value_that_holds_itself() -> None:
    def ring(value: int) -> list[object]:
        made: list[object] = [value]
        made.append(made)
        return made

    assert reading(ring(1)) == reading(ring(1)) != reading(ring(2))


def test_what_cannot_be_told(tmp_path: Path) -> None:
    reads = r"Reading.preprocess reads self.held, .*TextIOWrapper"
    with (tmp_path / "a").open("w") as file, pytest.raises(TaskError, match=reads) as caught:
        reading({"log": file})
    assert "make it in preprocess" in caught.value.hint


@dataclass(slots=True)
class InSlots(Task):
    held: int
    model = data = loss = optimizer = None  # type: ignore[assignment]

    def preprocess(self, rows: Any) -> Any:
        return self.held and rows


def test_a_task_with_slots() -> None:
    digests = [code_digest(InSlots(held)) for held in (1, 1, 2)]  # type: ignore[abstract]
    assert digests[0] == digests[1] != digests[2]
