"""Rows as columns: to Arrow and back, rows, slices, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.rows import MissingColumnError, Rows


def test_columns_rows_and_slices() -> None:
    rows = Rows({"x": np.arange(6).reshape(3, 2), "name": ["a", "b", "c"]})
    assert len(rows) == 3
    assert rows.columns == ("x", "name")
    assert rows["x"].shape == (3, 2)
    assert rows[1]["name"] == "b"
    assert rows[-1]["x"].tolist() == [4, 5]
    assert rows[1:]["name"].tolist() == ["b", "c"]
    assert rows[::-1]["name"].tolist() == ["c", "b", "a"]
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows.take(np.array([2, 0, 2]))["x"][:, 0].tolist() == [4, 0, 4]
    assert rows.take(np.array([True, False, True]))["name"].tolist() == ["a", "c"]
    assert len(rows.take([])) == 0
    with pytest.raises(IndexError, match="row 3 of 3"):
        rows[3]


def test_arrays_are_kept_without_a_copy() -> None:
    array = np.zeros((4, 3, 3), np.uint8)
    rows = Rows({"x": array})
    assert rows["x"] is array
    table = rows.to_table()
    assert str(table.schema.field("x").type.shape) == "[3, 3]"
    again = Rows.from_table(table)
    assert np.shares_memory(again["x"], array)
    assert np.shares_memory(again[1:3]["x"], array)
    assert not again["x"].flags.writeable


@pytest.mark.parametrize(
    "column",
    [
        np.arange(3, dtype=np.int8),
        np.array([True, False, True]),
        np.array([1, 2, 3], np.float16),
        np.arange(12, dtype=np.float32).reshape(3, 2, 2),
        np.zeros((3, 4), bool),
        np.array(["2020-01-01", "2021-01-01", "NaT"], "datetime64[s]"),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(24).reshape(3, 8)[:, ::2],
    ],
    ids=lambda column: f"{column.dtype}{column.shape}",
)
def test_an_array_comes_back_from_arrow(column: np.ndarray) -> None:
    back = Rows.from_table(Rows({"x": column}).to_table())["x"]
    assert back.dtype == column.dtype
    np.testing.assert_array_equal(back, column)


@pytest.mark.parametrize(
    "column",
    [["a", None, "ccc"], [b"", b"\xff", None], [{"a": 1}, None, {"a": 2}]],
)
def test_objects_come_back_from_arrow(column: list[object]) -> None:
    rows = Rows({"x": column})
    assert rows["x"].dtype == object
    assert Rows.from_table(rows.to_table())["x"].tolist() == column


def test_lists_of_equal_length_stay_lists() -> None:
    for column in ([[1, 2], [3, 4]], [np.arange(2), np.arange(2)], [np.arange(2), None]):
        rows = Rows({"x": column})
        assert rows["x"].shape == (2,)
        assert pa.types.is_list(rows.to_table()["x"].type)
    assert Rows({"x": [np.zeros((2, 2)), np.ones((2, 2))]})["x"].shape == (2, 2, 2)


def test_missing_values() -> None:
    big = 2**60 + 1
    rows = Rows.from_table(
        pa.table(
            {
                "int": pa.array([1, None], pa.int32()),
                "big": [big, None],
                "bool": [True, None],
                "vector": pa.array([[1, 2], None], pa.list_(pa.float32(), 2)),
                "word": pa.array(["a", None]).dictionary_encode(),
            }
        )
    )
    assert rows["int"].dtype == np.float64
    assert np.isnan(rows["int"][1])
    assert rows["big"].tolist() == [big, None]
    assert rows["bool"].tolist() == [True, None]
    assert rows["vector"][0].tolist() == [1, 2]
    assert rows["vector"][1] is None
    assert rows["word"].tolist() == ["a", None]
    kept = rows.take(np.array([1, 0])).to_table()
    assert kept["int"].to_pylist() == [None, 1]
    assert kept.schema.field("int").type == pa.int32()


def test_a_table_of_several_chunks_is_one() -> None:
    table = pa.concat_tables([Rows({"x": np.full((2, 2), i)}).to_table() for i in range(3)])
    assert Rows.from_table(table)["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_rows_travel_between_processes() -> None:
    rows = Rows.from_table(Rows({"x": np.arange(4), "s": list("abcd")}).to_table())
    again = pickle.loads(pickle.dumps(rows[1:3]))
    assert again["x"].tolist() == [1, 2]
    assert again["s"].tolist() == ["b", "c"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": [1, 2], "y": [1]}, "columns differ in length: 'y' has 1 values"),
        ({"x": 3}, "column 'x' is int, not a list"),
        ({"x": np.float32(3)}, "column 'x' is a single value"),
        ({"x": "text"}, "column 'x' is str, not a list"),
        (
            {"x": [np.zeros((2, 2)), np.zeros((2, 3))]},
            "column 'x' holds arrays of different shapes",
        ),
    ],
)
def test_what_is_no_column_is_refused(columns: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rows(columns)


@pytest.mark.parametrize("column", [np.zeros((2, 0)), np.array([1j]), np.array([object()])])
def test_what_arrow_cannot_hold_is_named(column: np.ndarray) -> None:
    with pytest.raises(ValueError, match="column 'x'"):
        Rows({"x": column}).to_table()


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(MissingColumnError) as refused:
        Rows({"x": [1], "y": [2]})["z"]
    assert str(refused.value) == "no column 'z'; there are 'x', 'y'"


class Tensor:
    """An array of another library."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.ones((2, 3), np.float32)


def test_what_other_libraries_hold() -> None:
    rows = Rows({"t": Tensor(), "a": pa.array([1, 2]), "u": ["a", "bb"]})
    assert rows["t"].shape == (2, 3)
    assert rows["a"].tolist() == [1, 2]
    assert repr(rows) == "Rows(2 rows; t: float32[3], a: int64, u: object)"


@given(st.lists(st.integers(-5, 4), max_size=8))
def test_take_is_numpys(indices: list[int]) -> None:
    table = pa.table({"i": pa.array([1, None, 3, 4, 5]), "s": list("abcde")})
    rows = Rows.from_table(table)
    taken = rows.take(np.array(indices, dtype=int))
    assert taken["s"].tolist() == [list("abcde")[i] for i in indices]
    assert taken.to_table()["i"].to_pylist() == [table["i"].to_pylist()[i] for i in indices]
