"""Data files as they come: separators, encodings, no header, JSON arrays, named directories."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloud.data import slices as module
from raycloud.data.formats import folders_of
from raycloud.data.index import Input
from raycloud.data.recipe import Recipe, key_of
from raycloud.data.slices import Slice, cut, read
from raycloud.errors import DataError
from raycloud.spec.sections import DataSection
from raycloud.task import Source
from tests.inputs import inputs_of


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    """All rows of the files at a path."""
    source = Source(path=str(path), **options)
    found = []
    for piece in cut(source, inputs_of(source)):
        for one in read(source, piece):
            assert not one.bad
            found += one.table.to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('"size, cm";y\n1;2\n', {}),
        ('"size, cm"\ty\n1\t2\n', {}),
        ('"size, cm"|y\n1|2\n', {}),
        ('"size, cm",y\n1,2\n', {}),
        ('"a ""quoted"", cm";y\n1;2\n'.replace('a ""quoted""', "size"), {}),
        ('"size, cm"^y\n1^2\n', {"delimiter": "^"}),
        ("1;2\n", {"names": ["size, cm", "y"]}),
    ],
)
def test_what_separates_values(tmp_path: Path, text: str, options: dict[str, Any]) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert rows(tmp_path, **options) == [{"size, cm": 1, "y": 2}]


def test_without_a_header_rows_are_numbered_from_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n3\n4,5\n")
    source = Source(path=str(tmp_path), names=["x", "y"])
    (piece,) = cut(source, inputs_of(source))
    (one,) = read(source, piece)
    assert one.table.to_pylist() == [{"x": 1, "y": 2}, {"x": 4, "y": 5}]
    assert one.bad == {1: "has 1 values, not 2"}


def test_numbers_in_the_place_of_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    with pytest.raises(DataError, match="begins with numbers alone") as caught:
        rows(tmp_path)
    assert "Source.names" in caught.value.hint
    assert rows(tmp_path, columns=["1", "2"]) == [{"1": 3, "2": 4}]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("packed", [False, True])
def test_other_encodings(tmp_path: Path, encoding: str, packed: bool) -> None:
    text = "name,x\nGr\u00fc\u00dfe,1\n"
    for name, content in (
        ("a.csv", text),
        ("b.jsonl", json.dumps({"name": "Gr\u00fc\u00dfe", "x": 1}, ensure_ascii=False) + "\n"),
        ("c.txt", "Gr\u00fc\u00dfe\n"),
    ):
        raw = content.encode(encoding)
        path = tmp_path / (name + (".gz" if packed else ""))
        path.write_bytes(gzip.compress(raw) if packed else raw)
        (row,) = rows(path, encoding=encoding)
        assert row["text" if name == "c.txt" else "name"] == "Gr\u00fc\u00dfe"
    (row,) = rows(path, encoding=encoding, unit="file")
    assert row["text"].removeprefix("\ufeff") == "Gr\u00fc\u00dfe\n"


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_utf_16_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("x,y\n1,2\n".encode("utf-16"))
    with pytest.raises(DataError, match="is UTF-16 text") as caught:
        rows(tmp_path)
    assert caught.value.hint == "give Source.encoding='utf-16'"


def test_an_encoding_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match="there is no such encoding"):
        rows(tmp_path, encoding="klingon")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("large", [False, True])
def test_a_json_array(
    tmp_path: Path, indent: int | None, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [{"x": k, "name": f"n{k}"} for k in range(100)]
    (tmp_path / "a.json").write_text(" \n" + json.dumps(wanted, indent=indent) + "\n")
    (tmp_path / "b.json").write_text("".join(json.dumps(row) + "\n" for row in wanted))
    if large:
        monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    assert rows(tmp_path) == wanted * 2


def test_a_json_array_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"x": 1}, {"x": ')
    with pytest.raises(DataError, match="begins as a JSON array, and is none"):
        rows(tmp_path)


def parts(folder: Path, names: list[str], **more: list[int]) -> None:
    for number, name in enumerate(names):
        part = folder / name
        part.mkdir(parents=True)
        pq.write_table(pa.table({"x": [number], **more}), part / "p.parquet")


def test_directories_that_name_a_column(tmp_path: Path) -> None:
    parts(tmp_path, ["day=1/kind=a%20b", "day=12/kind=c"])
    wanted = [{"x": 0, "day": 1, "kind": "a b"}, {"x": 1, "day": 12, "kind": "c"}]
    assert rows(tmp_path) == wanted
    assert rows(tmp_path, columns=["day", "x"]) == [{"day": 1, "x": 0}, {"day": 12, "x": 1}]
    assert rows(tmp_path, types={"day": "string"})[1]["day"] == "12"


def test_what_is_no_number_everywhere_is_text(tmp_path: Path) -> None:
    parts(tmp_path, ["day=01", "day=__HIVE_DEFAULT_PARTITION__"])
    assert [row["day"] for row in rows(tmp_path)] == ["01", None]


def test_a_column_of_the_file_counts(tmp_path: Path) -> None:
    parts(tmp_path, ["day=1"], day=[7])
    assert rows(tmp_path) == [{"x": 0, "day": 7}]
    assert rows(tmp_path, columns=["day"]) == [{"day": 7}]


def test_only_what_all_files_have_is_a_column(tmp_path: Path) -> None:
    parts(tmp_path, ["day=1", "other"])
    assert rows(tmp_path) == [{"x": 0}, {"x": 1}]
    assert folders_of("a/=1/9x=2/b=3/c.csv") == {"b": "3"}


def test_a_block_goes_by_its_directories_and_options(tmp_path: Path) -> None:
    """Files of the same content hold other rows where their directories or options say so."""
    file = Input(path="/a/day=1/p.parquet", bytes=1, digest="d")
    plain = Recipe(source=Source(path="a"), code="c", data=DataSection(), task="T")
    piece = Slice(inputs=(file,), format="csv")
    asked = [
        (plain, piece),
        (plain, replace(piece, folders=(("day", "int64"),))),
        (plain, replace(piece, folders=(("day", "string"),))),
        *(
            (replace(plain, source=Source(path="a", **option)), piece)
            for option in ({"delimiter": ";"}, {"names": ["x"]}, {"encoding": "latin-1"})
        ),
    ]
    assert len({key_of(*one) for one in asked}) == len(asked)
