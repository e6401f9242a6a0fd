"""Rows converted, checked and preprocessed; bad ones counted, named, and refused or left out."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raycloud.data.clean import clean, convert_columns
from raycloud.data.images import decode
from raycloud.data.slices import Piece
from raycloud.data.text import pack
from raycloud.errors import DataError, MachineError, SpecError, TaskError
from raycloud.rows import Rows
from raycloud.task import Source
from tests.inputs import bad_of, cleaned_of, rows_of, table_of

HERE = Source(path="here")


def pieces(*sizes: int) -> list[Piece]:
    starts = np.cumsum([0, *sizes])
    return [
        Piece(table=table_of(size, int(start)), file=f"f{i}")
        for i, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]


def test_rows_are_batched_over_files_and_stay_in_order() -> None:
    calls: list[int] = []

    def preprocess(rows: Rows) -> dict[str, object]:
        calls.append(len(rows))
        return {"x": rows["x"] * 2}

    out = clean(HERE, preprocess, pieces(3, 1, 4), skip=False)
    assert calls == [8]
    assert rows_of([out]) == [{"x": 2 * i} for i in range(8)]
    assert out.bad_rows == 0


def test_rows_that_nothing_is_done_to_keep_their_types() -> None:
    table = pa.table({"i": pa.array([1, None], pa.int16()), "s": pa.array(["a", None])})
    out = clean(HERE, lambda rows: rows, [Piece(table=table, file="f")], skip=False)
    assert out.tables == [table]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    bad=st.sets(st.integers(0, 40), max_size=8),
)
def test_bad_rows_are_found_by_halves(sizes: list[int], bad: set[int]) -> None:
    def preprocess(rows: Rows) -> Rows:
        hit = bad.intersection(rows["x"].tolist())
        if hit:
            raise ValueError(f"bad {min(hit)}")
        return rows

    total = sum(sizes)
    bad = {row for row in bad if row < total}
    out = clean(HERE, preprocess, pieces(*sizes), skip=True)
    assert [row["x"] for row in rows_of([out])] == [i for i in range(total) if i not in bad]
    assert out.bad_rows == len(bad)
    where = [(f"f{i}", row) for i, size in enumerate(sizes) for row in range(size)]
    assert bad_of([out]) == [(*where[row], f"ValueError: bad {row}") for row in sorted(bad)]


def test_bad_rows_end_in_an_error_that_counts_them() -> None:
    def preprocess(rows: Rows) -> Rows:
        if (rows["x"] % 10 == 3).any():
            raise ValueError("a three")
        return rows

    with pytest.raises(DataError) as refused:
        clean(HERE, preprocess, pieces(50, 50), skip=False)
    assert refused.value.message == (
        "10 rows of the data cannot be used: f0: row 3: ValueError: a three; f0: row 13: "
        "ValueError: a three; f0: row 23: ValueError: a three; f0: row 33: ValueError: a three; "
        "f0: row 43: ValueError: a three; and 5 more"
    )
    assert "data.bad_rows: skip" in refused.value.hint


def test_at_most_twenty_bad_rows_are_named_and_all_counted() -> None:
    table = pa.table({"x": ["bad"] * 5000 + ["1"]})
    source = Source(path="here", types={"x": "int64"})
    out = clean(source, lambda rows: rows, [Piece(table=table, file="f")], skip=True)
    assert (out.bad_rows, len(out.bad), rows_of([out])) == (5000, 20, [{"x": 1}])
    assert out.bad[19].row == 19


def test_a_slice_of_bad_rows_alone() -> None:
    table = pa.table({"x": ["a", "b"]})
    source = Source(path="here", types={"x": "int64"})
    out = clean(source, lambda rows: rows, [Piece(table=table, file="f")], skip=True)
    assert (out.bad_rows, out.tables) == (2, [])
    assert clean(source, lambda rows: rows, [], skip=True).tables == []


@pytest.mark.parametrize(
    ("values", "kind", "good"),
    [
        (["1", " 2 ", "x", "3.5", None, "NA", "99999999999"], "int32", [1, 2, None, None]),
        (["1.5", "nope", "1e3", "inf"], "float32", [1.5, 1000.0, float("inf")]),
        (["true", "FALSE", "1", "maybe"], "bool", [True, False, True]),
        (["2020-01-01", "later", ""], "date32", ["2020-01-01", None]),
        ([1, 2**40], "int32", [1]),
        ([1.0, 1.5], "int64", [1]),
        ([2**24 + 1], "float32", [2.0**24]),
        ([b"ok", b"\xff"], "string", ["ok"]),
        ([1, 2], "string", ["1", "2"]),
        ([True, None], "int8", [1, None]),
    ],
)
def test_types(values: list[object], kind: str, good: list[object]) -> None:
    sifted = convert_columns(pa.table({"x": values}), {"x": pa.type_for_alias(kind)})
    assert sifted.table["x"].type == pa.type_for_alias(kind)
    left = [v.isoformat() if hasattr(v, "isoformat") else v for v in sifted.table["x"].to_pylist()]
    assert left == good
    assert len(sifted.bad) == len(values) - len(good)
    assert all(f"is no {pa.type_for_alias(kind)}" in why for why in sifted.bad.values())


def test_required_values() -> None:
    table = pa.table({"label": [1.0, None, float("nan"), 2.0], "x": [1, 2, 3, 4]})
    source = Source(path="here", required=["label"])
    piece = Piece(table=table, file="f", numbers=np.arange(7, 11))
    out = clean(source, lambda rows: rows, [piece], skip=True)
    assert [row["x"] for row in rows_of([out])] == [1, 4]
    assert bad_of([out]) == [("f", 8, "'label' is missing"), ("f", 9, "'label' is missing")]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"types": {"x": "flot32"}}, "column 'x': there is no type 'flot32'"),
        ({"types": {"z": "int8"}}, "there is no column 'z'; there are x, l"),
        ({"required": ["z"]}, "there is no column 'z'"),
        ({"types": {"l": "int8"}}, r"column 'l' of list<item: int64> cannot become int8"),
    ],
)
def test_types_that_cannot_be(source: dict[str, object], words: str) -> None:
    table = pa.table({"x": [1], "l": [[1]]})
    with pytest.raises(DataError, match=words):
        clean(Source(path="h", **source), lambda r: r, [Piece(table=table, file="f")], skip=True)


def test_another_number_of_rows_may_come_out() -> None:
    def preprocess(rows: Rows) -> dict[str, object]:
        if None in rows["name"].tolist():
            raise TypeError("no name")
        packed = pack(rows["name"].tolist(), 4, separator=" ", pad=0)
        return {"tokens": packed.windows, "count": packed.counts}

    (table,) = clean(HERE, preprocess, pieces(3), skip=False).tables
    windows = [bytes(row["tokens"]) for row in Rows.from_table(table)]
    assert windows == [b"n0 n1", b"1 n2\x00"]
    assert clean(HERE, lambda rows: rows[:0], pieces(3), skip=False).tables == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda rows: None, "returned NoneType"),
        (lambda rows: [1, 2], "returned list"),
        (lambda rows: {"a": [1, 2], "b": [1]}, "columns differ in length: 'b' has 1"),
        (lambda rows: {"a": [np.zeros((2, 2)), np.zeros((3, 2))]}, "arrays of different shapes"),
        (lambda rows: {"a": [object()]}, "column 'a'"),
        (lambda rows: {"a": nothing}, "raised NameError: name 'nothing' is not defined"),  # noqa: F821
        (lambda rows: {"a": rows["b"]}, "raised MissingColumnError: no column 'b'; there are 'x'"),
        (lambda rows: rows["x"].sort(), "raised ValueError: .*read-only"),
    ],
)
def test_a_task_that_breaks_its_contract(returned: object, words: str) -> None:
    with pytest.raises(TaskError, match=words) as refused:
        clean(HERE, returned, pieces(4), skip=True)
    assert refused.value.hint


def test_columns_that_change_from_batch_to_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from raycloud.data import clean as room

    monkeypatch.setattr(room, "_BATCH_ROWS", 4)

    def preprocess(rows: Rows) -> dict[str, object]:
        return {"x": rows["x"] if rows["x"][0] < 4 else rows["x"] / 2}

    with pytest.raises(TaskError, match="'x' was int32 and is double") as refused:
        clean(HERE, preprocess, pieces(8), skip=False)
    assert "astype" in refused.value.hint
    assert len(clean(HERE, lambda rows: rows, pieces(8, 1), skip=False).tables) == 3


def test_our_own_errors_pass() -> None:
    def preprocess(rows: Rows) -> Rows:
        raise SpecError("settings.size", 3, "is too small")

    with pytest.raises(SpecError):
        clean(HERE, preprocess, pieces(4), skip=True)


def test_files_of_other_columns_are_told_apart() -> None:
    one = Piece(table=pa.table({"x": [1]}), file="a")
    for other, words in (
        (pa.table({"y": [1]}), "'b' has other columns than 'a': 'x' was int64 and is not there"),
        (pa.table({"x": ["s"]}), "'x' was int64 and is string"),
    ):
        with pytest.raises(DataError, match=words):
            clean(HERE, lambda r: r, [one, Piece(table=other, file="b")], skip=True)
    source = Source(path="here", types={"x": "string"})
    both = [one, Piece(table=pa.table({"x": ["s"]}), file="b")]
    assert rows_of([clean(source, lambda r: r, both, skip=False)]) == [{"x": "1"}, {"x": "s"}]


def test_an_undecodable_image_and_a_missing_label(tmp_path: Path) -> None:
    def jpeg(shade: int) -> bytes:
        sink = BytesIO()
        Image.new("RGB", (8, 8), (shade,) * 3).save(sink, "JPEG")
        return sink.getvalue()

    images = [jpeg(i) for i in range(30)]
    images[3] = images[3][: len(images[3]) // 2]
    images[17] = b"no image"
    labels: list[int | None] = list(range(30))
    labels[5] = None
    pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "a.parquet")
    source = Source(path=str(tmp_path), required=["label"], types={"label": "int64"})

    def preprocess(rows: Rows) -> dict[str, object]:
        return {"pixels": decode(rows["image"]), "label": rows["label"]}

    out = cleaned_of(source, preprocess, skip=True)
    told = bad_of(out)
    assert [(row, why[:32]) for _, row, why in told] == [
        (5, "'label' is missing"),
        (3, "ValueError: image 0 cannot be de"),
        (17, "ValueError: image 0 cannot be de"),
    ]
    rows = Rows.from_table(pa.concat_tables([table for one in out for table in one.tables]))
    assert rows["pixels"].shape == (27, 8, 8, 3)
    assert rows["label"].tolist() == [i for i in range(30) if i not in {3, 5, 17}]
    with pytest.raises(DataError, match=r"3 rows .*a.parquet: row 3: .*row 5: .*row 17: "):
        cleaned_of(source, preprocess)


def test_large_pieces_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from raycloud.data import clean as room

    monkeypatch.setattr(room, "_BATCH_BYTES", 1000)
    sizes: list[int] = []

    def preprocess(rows: Rows) -> Rows:
        sizes.append(len(rows))
        if 33 in rows["x"].tolist():
            raise ValueError("33")
        return rows

    table = pa.table({"image": [bytes(100)] * 50, "x": range(50)})
    piece = Piece(table=table, file="f", numbers=100 + np.arange(50) * 2)
    out = clean(HERE, preprocess, [piece], skip=True)
    assert max(sizes) < 10
    assert [row["x"] for row in rows_of([out])] == [i for i in range(50) if i != 33]
    assert bad_of([out]) == [("f", 166, "ValueError: 33")]


def test_a_bad_json_line_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": 1}) + "\n{\n" + json.dumps({"x": None}))
    source = Source(path=str(tmp_path), required=["x"])
    out = cleaned_of(source, skip=True)
    assert [row for _, row, _ in bad_of(out)] == [1, 2]
    assert sum(one.bad_rows for one in out) == 2


@pytest.mark.parametrize("error", [MemoryError("2 TB"), ConnectionResetError("x"), TimeoutError()])
@pytest.mark.parametrize("skip", [True, False])
def test_what_no_row_is_to_blame_for(error: Exception, skip: bool) -> None:
    def preprocess(rows: Rows) -> Rows:
        if 2 in rows["x"].tolist():
            raise error
        return rows

    with pytest.raises(MachineError, match=f"Task.preprocess raised {type(error).__name__}"):
        clean(HERE, preprocess, pieces(4), skip=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_an_exit_is_no_rows_fault(skip: bool) -> None:
    def preprocess(rows: Rows) -> Rows:
        sys.exit("no vocabulary")

    with pytest.raises(TaskError, match=r"Task\.preprocess raised SystemExit: no vocabulary"):
        clean(HERE, preprocess, pieces(4), skip=skip)


def test_fewer_rows_where_memory_is_short() -> None:
    def preprocess(rows: Rows) -> Rows:
        if len(rows) > 2:
            raise MemoryError
        return rows

    out = clean(HERE, preprocess, pieces(8), skip=False)
    assert [row["x"] for row in rows_of([out])] == list(range(8))
