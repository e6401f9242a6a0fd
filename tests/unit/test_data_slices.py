"""Cutting inputs the same way whoever cuts, and reading every row of them once."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from raycloud.data import slices
from raycloud.data.index import Input
from raycloud.data.slices import Slice, cut, read
from raycloud.errors import DataError
from raycloud.task import Source
from tests.inputs import (
    bad_of,
    cleaned_of,
    column,
    inputs_of,
    pieces_of,
    places,
    rows_of,
    slices_of,
    table_of,
)
from tests.tiers import examples


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a thousandth of their size."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 32 * 2**10)
    monkeypatch.setattr(slices, "IMAGES_BYTES", 4 * 2**10)


def write_parquet(path: Path, table: pa.Table, rows: int) -> None:
    pq.write_table(table, path, row_group_size=rows, compression="none")


def write_arrow(path: Path, table: pa.Table, rows: int, *, stream: bool = False) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def numbered(files: dict[str, int]) -> list[tuple[str, int]]:
    return [(name, row) for name, rows in files.items() for row in range(rows)]


@pytest.mark.usefixtures("small")
def test_parquet_is_cut_at_row_groups(tmp_path: Path) -> None:
    for i in range(2):
        write_parquet(tmp_path / f"{i}.parquet", table_of(5000, 5000 * i), 1000)
    source = Source(path=str(tmp_path))
    found = slices_of(source)
    assert [(part.start, part.stop) for part in found] == [(0, 2), (2, 4), (4, 5)] * 2
    pieces = pieces_of(source)
    assert column(pieces, "x") == list(range(10000))
    assert places(pieces) == numbered({"0.parquet": 5000, "1.parquet": 5000})
    assert slices_of(source) == found


@pytest.mark.usefixtures("small")
def test_images_in_parquet_make_smaller_slices(tmp_path: Path) -> None:
    table = pa.table({"image": [bytes(100)] * 200, "x": range(200)})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=20, compression="none", use_dictionary=False)
    assert len(slices_of(Source(path=str(tmp_path)))) == 10
    assert len(slices_of(Source(path=str(tmp_path), columns=["x"]))) == 1


@pytest.mark.usefixtures("small")
def test_small_files_lie_together(tmp_path: Path) -> None:
    for i in range(10):
        write_parquet(tmp_path / f"{i}.parquet", table_of(300, 300 * i), 300)
    source = Source(path=str(tmp_path))
    found = slices_of(source)
    assert 1 < len(found) < 6
    assert [file for part in found for file in part.inputs] == inputs_of(source)
    pieces = pieces_of(source)
    assert column(pieces, "x") == list(range(3000))
    assert places(pieces) == numbered({f"{i}.parquet": 300 for i in range(10)})
    assert (
        cut(source, inputs_of(source)[:9])[:-1]
        == found[: len(cut(source, inputs_of(source)[:9])) - 1]
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_are_cut_at_batches_and_streams_are_not(tmp_path: Path, stream: bool) -> None:
    write_arrow(tmp_path / "a.arrow", table_of(5000), 500, stream=stream)
    source = Source(path=str(tmp_path))
    assert (len(slices_of(source)) > 2) == (not stream)
    pieces = pieces_of(source)
    assert column(pieces, "x") == list(range(5000))
    assert places(pieces) == numbered({"a.arrow": 5000})


def test_columns_are_projected_and_dictionaries_spelled_out(tmp_path: Path) -> None:
    table = table_of(10)
    table = table.append_column("d", table["name"].dictionary_encode())
    write_parquet(tmp_path / "a.parquet", table, 5)
    write_arrow(tmp_path / "a.arrow", table, 5)
    for name in ("a.parquet", "a.arrow"):
        (cleaned,) = cleaned_of(Source(path=str(tmp_path / name), columns=["d", "x"]))
        read = pa.concat_tables(cleaned.tables)
        assert read.column_names == ["d", "x"]
        assert read["d"].type == pa.string()
        assert read["d"].to_pylist() == table["name"].to_pylist()
        with pytest.raises(DataError, match=f"{name}' has no column 'z'; it has 'x', 'name', 'd'"):
            pieces_of(Source(path=str(tmp_path / name), columns=["z"]))


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(["", "a", "bb", "c" * 30, "d" * 200, "é"]), max_size=30),
    target=st.integers(1, 120),
    end=st.sampled_from(["", "\n", "\r\n"]),
)
def test_every_line_of_a_text_is_read_once(
    tmp_path: Path, lines: list[str], target: int, end: str
) -> None:
    newline = end or "\n"
    text = newline.join(lines) + end
    (tmp_path / "a.txt").write_bytes(text.encode())
    expected = text.replace("\r\n", "\n").split("\n")
    if expected[-1] == "":
        expected.pop()
    source = Source(path=str(tmp_path / "a.txt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_BYTES", target)
        pieces = pieces_of(source)
        assert column(pieces, "text") == expected
        assert places(pieces) == numbered({"a.txt": len(expected)})


def test_texts_compressed_whole_and_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\xff\nthree"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\n")
    lines = Source(path=str(tmp_path))
    pieces = pieces_of(lines)
    assert column(pieces, "text") == ["one", "three", "one"]
    assert places(pieces) == [("a.txt.gz", 0), ("a.txt.gz", 2), ("b.txt", 0)]
    cleaned = cleaned_of(lines, skip=True)
    assert bad_of(cleaned) == [("a.txt.gz", 1, "is not UTF-8")]
    whole = Source(path=str(tmp_path), unit="file", columns=["text"])
    assert bad_of(cleaned_of(whole, skip=True)) == [("a.txt.gz", 0, "is not UTF-8")]
    assert places(pieces_of(whole)) == [("b.txt", 0)]


@pytest.mark.usefixtures("small")
def test_json_lines_are_cut_at_lines_and_bad_ones_named(tmp_path: Path) -> None:
    rows = [json.dumps({"x": i, "s": f"v{i}", "l": [i]}) for i in range(5000)]
    rows[10] = "nope"
    rows[4000] = '{"x": "much", "s": "v", "l": []}'
    rows[4500] = "[1, 2]"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = Source(path=str(tmp_path))
    found = slices_of(source)
    assert len(found) > 3
    assert dict(found[0].types) == {"x": "int64", "s": "string"}
    cleaned = cleaned_of(source, skip=True)
    left = rows_of(cleaned)
    assert [row["x"] for row in left] == [i for i in range(5000) if i not in {10, 4000, 4500}]
    assert left[7] == {"x": 7, "s": "v7", "l": [7]}
    assert sum(one.bad_rows for one in cleaned) == 3
    assert bad_of(cleaned) == [
        ("a.jsonl", 10, "is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("a.jsonl", 4000, "'x' = 'much' is no int64"),
        ("a.jsonl", 4500, "is no JSON object, but list"),
    ]


def test_json_blank_lines_dates_and_missing_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"d": "2020-01-01", "n": 1}\n\n{"d": null, "x": 2.5}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3} {"n": 4}\n{"n": "5"}\n{"n": null}\n')
    source = Source(path=str(tmp_path), columns=["n", "d"], types={"n": "float32"})
    cleaned = cleaned_of(source, skip=True)
    assert rows_of(cleaned) == [
        {"n": 1.0, "d": "2020-01-01"},
        {"n": None, "d": None},
        {"n": 5.0, "d": None},
        {"n": None, "d": None},
    ]
    (told,) = bad_of(cleaned)
    assert told[:2] == ("b.jsonl", 0)
    assert places(pieces_of(source))[:2] == [("a.jsonl", 1), ("a.jsonl", 3)]


def test_csv_types_bad_rows_and_missing_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'id,city,price,sold\n1,Rome,2.5,TRUE\n2,"",NA,FALSE\n3\n\n4,,x,true\n5,"two\nlines",1e3,1\n6,a,b,c,d\n'
    )
    (tmp_path / "b.csv").write_text("id,city,price,sold\nseven,Oslo,1,false\n")
    types = {"id": "int32", "price": "float32", "sold": "bool"}
    cleaned = cleaned_of(Source(path=str(tmp_path), types=types), skip=True)
    assert rows_of(cleaned) == [
        {"id": 1, "city": "Rome", "price": 2.5, "sold": True},
        {"id": 2, "city": "", "price": None, "sold": False},
        {"id": 5, "city": "two\nlines", "price": 1000.0, "sold": True},
    ]
    assert bad_of(cleaned) == [
        ("a.csv", 2, "has 1 values, not 4"),
        ("a.csv", 3, "'price' = 'x' is no float"),
        ("a.csv", 5, "has 5 values, not 4"),
        ("b.csv", 0, "'id' = 'seven' is no int32"),
    ]
    with pytest.raises(DataError, match=r"^4 rows of the data.*a.csv: row 2: has 1 values, not 4;"):
        cleaned_of(Source(path=str(tmp_path), types=types))


def test_csv_of_many_blocks_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raycloud.data import formats_tables

    monkeypatch.setattr(formats_tables, "_CSV_BYTES", 64)
    bad = {0, 1, 17, 50, 51, 52, 299}
    lines = [f"{i}" if i in bad else f"{i},{'é' * (i % 5)}" for i in range(300)]
    (tmp_path / "a.csv").write_text("x,s\n" + "\n".join(lines) + "\n")
    source = Source(path=str(tmp_path))
    pieces = pieces_of(source)
    assert len(pieces) > 10
    expected = [i for i in range(300) if i not in bad]
    assert column(pieces, "x") == expected
    assert places(pieces) == [("a.csv", i) for i in expected]
    assert [row for _, row, _ in bad_of(cleaned_of(source, skip=True))] == sorted(bad)


def test_csv_types_are_found_once_for_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;when;empty\n1;2020-01-01;\n")
    (tmp_path / "b.csv").write_text("x;when;empty\n1.5;2020-01-01;a\n2;;\n")
    source = Source(path=str(tmp_path))
    (part,) = slices_of(source)
    assert dict(part.types) == {"x": "int64", "when": "string", "empty": "string"}
    with pytest.raises(DataError, match=r"b.csv: row 0: 'x' = '1.5' is no int64") as refused:
        cleaned_of(source)
    assert "Source.types" in refused.value.hint
    assert len(rows_of(cleaned_of(Source(path=str(tmp_path), types={"x": "float64"})))) == 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("b.csv", "x,y\n", "has other columns than the first file: it lacks"),
        ("b.csv", "x,s,z\n1,2,3\n", "has other columns than the first file: it has .'z'. besides"),
        ("0.csv", "x,x\n1,2\n", "several columns named 'x'"),
        ("b.csv", "", "b.csv' is empty: not even a header"),
    ],
)
def test_csv_headers_that_do_not_fit(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text("x,s\n1,2\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        cleaned_of(Source(path=str(tmp_path)))


def test_tabs_and_compression(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"x\ts\n1\ta,b\n"))
    assert rows_of(cleaned_of(Source(path=str(tmp_path)))) == [{"x": 1, "s": "a,b"}]
    (tmp_path / "a.tsv.gz").unlink()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}'))
    assert rows_of(cleaned_of(Source(path=str(tmp_path)))) == [{"x": 1}, {"x": 2}]


@pytest.mark.usefixtures("small")
def test_image_files_are_labelled_by_their_folder(tmp_path: Path) -> None:
    for i in range(20):
        path = tmp_path / ("cat" if i % 2 else "dog") / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([i]) * 1000)
    source = Source(path=str(tmp_path))
    assert len(slices_of(source)) == 5
    pieces = pieces_of(source)
    assert column(pieces, "label") == ["cat"] * 10 + ["dog"] * 10
    assert column(pieces, "image")[0] == b"\x01" * 1000
    assert column(pieces, "path")[0] == str(tmp_path / "cat/01.png")
    assert places(pieces)[:2] == [("01.png", 0), ("03.png", 0)]


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    cuts = {"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"\x00garbage" * 50}
    path.write_bytes(cuts[kind])


@pytest.mark.parametrize("kind", ["truncated", "empty", "garbage"])
@pytest.mark.parametrize("name", ["b.parquet", "b.arrow", "b.txt.gz", "b.jsonl.gz", "b.csv.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 1000, 50_000).tolist()
    table = pa.table({"x": noise})
    path = tmp_path / name
    if name == "b.parquet":
        write_parquet(path, table, 100_000)
    elif name == "b.arrow":
        write_arrow(path, table, 1000)
    elif name == "b.jsonl.gz":
        path.write_bytes(gzip.compress(b"".join(b'{"x": %d}\n' % i for i in noise)))
    else:
        path.write_bytes(gzip.compress(b"x\n" + b"".join(b"%d\n" % i for i in noise)))
    damage(path, kind)
    if kind == "empty" and name in {"b.txt.gz", "b.jsonl.gz"}:
        return  # no lines are no damage
    with pytest.raises(DataError, match=rf"{name}' is (damaged: \w+|empty)") as refused:
        cleaned_of(Source(path=str(path)))
    assert refused.value.hint


def test_a_slice_survives_json_and_its_file_must_be_there(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", table_of(10), 5)
    source = Source(path=str(tmp_path))
    (part,) = slices_of(source)
    record = json.loads(json.dumps(asdict(part)))
    record["inputs"] = tuple(Input(**one) for one in record["inputs"])
    for name in ("types", "folders"):
        record[name] = tuple(tuple(pair) for pair in record[name])
    assert Slice(**record) == part
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"a.parquet' is not there"):
        list(read(source, part))
    assert cut(source, []) == ()
