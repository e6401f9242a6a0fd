"""Digests of files and of tables: what content is known by."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raycloud.clock import VirtualClock
from raycloud.data import digest as digest_module
from raycloud.data.digest import combined, inputs_of, rows_digest, table_digest
from raycloud.data.location import File, locate
from raycloud.errors import DataError
from raycloud.task import Source, Task


def inputs(source: Source, root: Path, now_s: float = 1e10) -> list[str]:
    found = inputs_of(source, locate(source), root, VirtualClock(now_s))
    return [one.digest for one in found]


def test_local_files_are_known_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, text in (("a.txt", "one\n"), ("b.txt", "two\n"), ("c.txt", "one\n")):
        (tmp_path / "d" / name).write_text(text)
    source = Source(path=str(tmp_path / "d"))
    found = inputs_of(source, locate(source), tmp_path / "cache", VirtualClock(1e10))
    assert [Path(one.path).name for one in found] == ["a.txt", "b.txt", "c.txt"]
    assert [one.bytes for one in found] == [4, 4, 4]
    assert found[0].digest == hashlib.blake2b(b"one\n", digest_size=16).hexdigest()
    assert found[0].digest == found[2].digest != found[1].digest


def test_digests_of_local_files_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    path, cache = tmp_path / "d" / "a.txt", tmp_path / "cache"
    path.write_text("one\n")
    source, read = Source(path=str(path)), []
    content = digest_module._content
    monkeypatch.setattr(digest_module, "_content", lambda f: read.append(1) or content(f))
    first = inputs(source, cache)
    assert inputs(source, cache) == first
    assert len(read) == 1
    path.write_text("two\n")  # of the same size
    assert inputs(source, cache) != first
    assert len(read) == 2
    (cache / "digests.json").write_text("{")  # it is only worth the time
    assert len({*inputs(source, cache), *first}) == 2
    record = json.loads((cache / "digests.json").read_text())
    assert (record["format"], list(record["files"])) == (1, [str(path)])


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    written = path.stat()
    source = Source(path=str(path))
    first = inputs(source, tmp_path / "cache", now_s=written.st_mtime + 1)
    with path.open("r+") as file:
        file.write("two\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert inputs(source, tmp_path / "cache") != first


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    source = Source(path=str(path))
    files = locate(source)
    path.unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        inputs_of(source, files, tmp_path / "cache", VirtualClock())


def test_remote_files_are_known_by_what_their_store_says(tmp_path: Path) -> None:
    source = Source(path="s3://bucket/a")

    def digest(**values: Any) -> str:
        values = {"path": "s3://bucket/a", "bytes": 5, "modified_ns": 7, "tag": "e", **values}
        return inputs_of(source, [File(**values)], tmp_path, VirtualClock())[0].digest

    others = [digest(path="s3://bucket/b"), digest(bytes=6), digest(modified_ns=8), digest(tag="f")]
    assert digest() == digest()
    assert len({digest(), *others}) == 5
    assert not (tmp_path / "digests.json").exists()


def test_a_store_that_says_nothing_is_read(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/digests/a.txt", b"one\n")
    source = Source(path="memory://digests/a.txt")
    files = [File(path=file.path, bytes=4, modified_ns=None, tag=None) for file in locate(source)]
    found = inputs_of(source, files, tmp_path, VirtualClock())
    assert found[0].digest == hashlib.blake2b(b"one\n", digest_size=16).hexdigest()
    memory.rm("/digests", recursive=True)


# Tables and keys.


def test_a_table_is_known_by_its_rows() -> None:
    rows = {"x": [1, None, 3, 4], "s": ["a", "b", None, "d"], "l": [[1], [], None, [2, 3]]}
    whole = pa.table(rows)
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2), whole.slice(3)])
    longer = pa.concat_tables([whole, whole]).slice(4)
    assert table_digest([whole]) == table_digest([chunked]) == table_digest([longer])
    assert table_digest([whole.replace_schema_metadata({"a": "b"})]) == table_digest([whole])
    coded = whole.set_column(1, "s", whole["s"].dictionary_encode())
    again = pa.concat_tables([coded.slice(0, 2), coded.slice(2)])
    assert table_digest([coded]) == table_digest([again])
    for other in (
        pa.table({**rows, "x": [1, None, 3, 5]}),
        pa.table({**rows, "x": [1, 0, 3, 4]}),
        whole.rename_columns(["y", "s", "l"]),
        whole.slice(1),
        whole.set_column(0, "x", whole["x"].cast(pa.int32())),
    ):
        assert table_digest([other]) != table_digest([whole])


class Cut(Task):
    """Its rows follow from `length` and `path` alone."""

    def __init__(self, *, length: int = 4, rate: float = 0.1, path: str = "a.txt") -> None:
        self.length, self.rate, self.path = length, rate, path

    def preprocess(self, rows: Any) -> Any:
        return {"text": [one[: self.length] for one in rows["text"]]}

    model = loss = optimizer = data = None  # type: ignore[assignment] # nobody asks for them

    def digest(self, **source: Any) -> str | None:
        def taken(name: str) -> bool:
            return name.endswith(self.path)

        given = {"path": "d", "select": taken, **source}
        return rows_digest(self, {"train": Source(**given)})


def test_tasks_of_the_same_rows_are_known_as_such() -> None:
    plain = Cut().digest()
    assert plain is not None
    assert plain == Cut(rate=0.2).digest()
    others = [
        Cut(length=5).digest(),
        Cut(path="b.txt").digest(),
        Cut().digest(path="e"),
        Cut().digest(required=["text"]),
        Cut().digest(path=None, dataset=pa.table({"text": ["a"]}), key="rows"),
    ]
    assert None not in others
    assert len({plain, *others}) == 6
    assert Cut().digest(path=None, dataset=pa.table({"text": ["a"]})) is None
    with Path(os.devnull).open() as opaque:
        assert Cut().digest(filesystem=opaque) is None


def test_combined_keeps_parts_apart() -> None:
    assert len({combined("a", "b"), combined("ab"), combined(["a", "b"]), combined("a", None)}) == 4
    assert combined({"a": 1, "b": 2}) == combined({"b": 2, "a": 1})
