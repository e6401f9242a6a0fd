"""Whether several machines see one place for checkpoints."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloud.checkpoint import DamagedError, Store, check_shared, marked, open_store, steps
from raycloud.checkpoint import store as store_module
from raycloud.errors import CheckpointError, RaycloudError, SpecError
from tests.checkpoints import drafts


@pytest.fixture(params=["local", "file-url", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    places = {
        "local": str(tmp_path / "deep" / "er"),
        "file-url": f"file://{tmp_path}/deep",
        "memory": f"memory://{uuid.uuid4().hex}/deep",
    }
    return open_store(places[request.param])


def test_what_is_written_is_read(store: Store) -> None:
    assert store.names() == []
    store.write("step-1/a.json", [b"one ", memoryview(b"two")])
    store.write("b", [])
    assert store.names() == ["b", "step-1/a.json"]
    assert store.names("step-") == ["step-1/a.json"]
    assert drafts(store) == []
    assert store.read("step-1/a.json") == b"one two"
    assert b"".join(store.stream("step-1/a.json")) == b"one two"
    assert (store.size("step-1/a.json"), store.size("b")) == (7, 0)
    assert store.exists("b")
    assert not store.exists("step-1")
    assert not store.exists("c")


def test_a_write_replaces(store: Store) -> None:
    store.write("a", [b"long content"])
    store.write("a", [b"short"])
    assert store.read("a") == b"short"
    assert store.names() == ["a"]


def test_remove(store: Store) -> None:
    store.write("d/a", [b"1"])
    store.write("d/b", [b"2"])
    store.remove_all(["d/a"])
    store.remove_all(["d/a"])
    assert store.names() == ["d/b"]
    store.remove_all(["d/b"])
    assert store.names() == []


def test_a_writer_that_raises_leaves_what_was_there(store: Store) -> None:
    store.write("a", [b"before"])

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write("a", broken())
    assert store.read("a") == b"before"
    assert drafts(store) == []


def test_drafts_are_not_files(store: Store) -> None:
    store.write("d/a", [b"1"])
    if store.place.startswith("memory"):
        pytest.skip("drafts of killed writers are made by hand on disk only")
    draft = Path(store.place) / "d" / "a.00ff.draft"
    draft.write_bytes(b"half")
    assert store.names() == ["d/a"]
    assert drafts(store) == ["d/a.00ff.draft"]
    with pytest.raises(CheckpointError, match="draft"):
        store.read("d/a.00ff.draft")
    store.remove_all(["d/a.00ff.draft"])
    assert drafts(store) == []


def test_what_others_keep_beside_is_not_touched(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("step-1/a", [b"1"])
    (tmp_path / "loop").symlink_to("loop")
    assert store.sizes("step-") == {"step-1/a": 1}


@pytest.mark.parametrize(
    "name",
    [
        *["", "/etc/passwd", "..", "a/../b", "../a", "a//b", "a/", "./a", ".hidden", "a b", "a\0"],
        *["a\n", "a\\b", "~", "a/*", "ä", "a" * 201, "/".join(["a" * 100] * 11), "a:b", "x.draft"],
    ],
)
def test_names_are_plain(store: Store, name: str) -> None:
    for act in (store.read, store.size, store.exists, lambda n: store.write(n, [b""])):
        with pytest.raises(CheckpointError, match=r"name|draft"):
            act(name)
    assert store.names() == []


def test_missing_is_damage(store: Store) -> None:
    for act in (store.read, store.size, lambda n: list(store.stream(n))):
        with pytest.raises(DamagedError, match=r"a/b.* is missing") as caught:
            act("a/b")
        assert "share" in caught.value.hint


def test_errors_survive_pickling(store: Store) -> None:
    with pytest.raises(DamagedError) as caught:
        store.read("a")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is DamagedError
    assert isinstance(again, RaycloudError)
    assert str(again) == str(caught.value)


class _Failing:
    """Stands for `os` in the store; one call fails."""

    def __init__(self, call: str, number: int) -> None:
        self._call = call
        self._number = number

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(os, name)

        def fail(*_: object, **__: object) -> None:
            raise OSError(self._number, os.strerror(self._number))

        return fail


@pytest.mark.parametrize(
    ("call", "number", "hint"),
    [
        ("write", errno.ENOSPC, "free space"),
        ("write", errno.EDQUOT, "free space"),
        ("fsync", errno.ENOSPC, "free space"),
        ("fsync", errno.EIO, "checkpoint.path"),
        ("open", errno.EACCES, "right to read and write"),
        ("open", errno.EROFS, "read-only"),
    ],
)
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, hint: str
) -> None:
    store = open_store(tmp_path)
    store.write("d/a", [b"before"])
    monkeypatch.setattr(store_module, "os", _Failing(call, number))
    with pytest.raises(CheckpointError) as caught:
        store.write("d/a", [b"after"])
    assert str(tmp_path / "d" / "a") in caught.value.message
    assert hint in caught.value.hint
    monkeypatch.undo()
    assert store.read("d/a") == b"before"
    assert drafts(store) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        open_store(tmp_path / "taken").write("a/b", [b""])
    assert "file lies where a directory should be" in caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        open_store(tmp_path).write("a/b", [b""])
    tmp_path.chmod(0o700)
    assert "right to read and write" in caught.value.hint


def test_files_have_the_rights_that_others_expect(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        open_store(tmp_path).write("a", [b""])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, memoryview(data)[:3]))
    store = open_store(tmp_path)
    store.write("a", [b"0123456789", b"ab"])
    assert store.read("a") == b"0123456789ab"


def test_stores_that_cannot_be_opened() -> None:
    with pytest.raises(CheckpointError, match="cannot be opened") as caught:
        open_store("nosuch://user:secret@host/path")
    assert "secret" not in str(caught.value)
    assert "nosuch://" in caught.value.hint
    with pytest.raises(CheckpointError, match="chains"):
        open_store("simplecache::memory://a")


def test_the_same_place_is_seen(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with marked(store) as mark:
        check_shared(open_store(tmp_path), mark, "b")
        assert steps(store) == []
    assert store.names() == []


def test_another_place_is_named_with_its_node_and_a_remedy(tmp_path: Path) -> None:
    there = open_store(tmp_path / "there")
    with marked(open_store(tmp_path / "here")) as mark, pytest.raises(SpecError) as refused:
        check_shared(there, mark, "b")
    assert refused.value.field == "checkpoint.path"
    assert "is another place on node b" in str(refused.value)
    assert "s3://BUCKET/NAME" in str(refused.value.hint)
    assert there.names() == []


def test_what_a_killed_driver_left_is_taken_away(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write("mark-00", [b""])
    store.write("step-00000001/manifest.json", [b"{}"])
    with marked(store) as mark:
        assert store.names("mark-") == [mark]
    assert store.names() == ["step-00000001/manifest.json"]
