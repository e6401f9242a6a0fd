"""Finding files: paths, directories, patterns, URLs; and clear refusals without credentials."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from pyarrow import fs

from raycloud.data.filesystems import redacted, without_credentials
from raycloud.data.location import File, is_local, locate, open_file
from raycloud.data.retry import is_transient, status_of, with_retries
from raycloud.errors import DataError
from raycloud.task import Source


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b/2.csv",
        "b/1.csv",
        "a/x/3.csv",
        "a/4.jsonl",
        "README.md",
        "_temporary/5.csv",
        ".hidden.csv",
        "odd [1].csv",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(root: Path | str, files: list[File]) -> list[str]:
    return [file.path.removeprefix(str(root)).strip("/") for file in files]


def test_a_directory_is_searched_to_its_depths(tree: Path) -> None:
    files = locate(Source(path=str(tree), format="csv"))
    assert names(tree, files) == ["a/x/3.csv", "b/1.csv", "b/2.csv", "odd [1].csv"]
    assert files[0].bytes == len("a/x/3.csv")
    assert files[0].modified_ns == (tree / "a/x/3.csv").stat().st_mtime_ns


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("b/*.csv", ["b/1.csv", "b/2.csv"]),
        ("b/[2-3].csv", ["b/2.csv"]),
        ("?/*.csv", ["b/1.csv", "b/2.csv"]),
        ("**/*.csv", ["a/x/3.csv", "b/1.csv", "b/2.csv", "odd [1].csv", "_temporary/5.csv"]),
        ("a/**", ["a/x/3.csv"]),
        ("*/x", ["a/x/3.csv"]),
        ("odd [1].csv", ["odd [1].csv"]),
        ("b/1.csv", ["b/1.csv"]),
        (".hidden.csv", [".hidden.csv"]),
    ],
)
def test_a_pattern(tree: Path, pattern: str, expected: list[str]) -> None:
    (tree / "a/4.jsonl").unlink()
    assert sorted(names(tree, locate(Source(path=str(tree / pattern))))) == sorted(expected)


def test_several_paths_name_each_file_once(tree: Path) -> None:
    paths = [str(tree / "b"), str(tree / "b/1.csv"), str(tree / "a/x")]
    assert names(tree, locate(Source(path=paths))) == ["a/x/3.csv", "b/1.csv", "b/2.csv"]


def test_a_relative_path_is_made_absolute(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert locate(Source(path="b/1.csv"))[0].path == str(tree / "b/1.csv")
    assert locate(Source(path=f"file://{tree}/b/1.csv"))[0].path == str(tree / "b/1.csv")
    assert locate(Source(path=tree / "b/1.csv"))[0].path == str(tree / "b/1.csv")  # type: ignore[arg-type]


def test_select_is_asked_with_paths_below(tree: Path) -> None:
    asked: list[str] = []

    def select(path: str) -> bool:
        asked.append(path)
        return path.endswith("1.csv")

    assert names(tree, locate(Source(path=str(tree / "b"), select=select))) == ["b/1.csv"]
    assert sorted(asked) == ["1.csv", "2.csv"]
    with pytest.raises(DataError, match=r"Source.select takes none of the 2 files"):
        locate(Source(path=str(tree / "b"), select=lambda _: False))


def test_a_readme_beside_data_is_no_data(tree: Path) -> None:
    assert names(tree, locate(Source(path=[str(tree / "b"), str(tree)], select=None, format="csv")))
    (tree / "a/4.jsonl").unlink()
    assert "README.md" not in names(tree, locate(Source(path=str(tree))))
    assert names(tree, locate(Source(path=str(tree), format="text"))) == ["README.md"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "{tree}/nothing"}, "no files are found at '{tree}/nothing'"),
        ({"path": "{tree}/b/*.parquet"}, "no files are found"),
        ({"path": "{tree}/b", "format": "parquet"}, r"no parquet files .* end in .csv \(2\)"),
        ({"path": "{tree}"}, "files of several formats: '{tree}/a/4.jsonl' is jsonl; .* is csv"),
        ({"path": []}, "no files are named"),
        ({"path": " "}, "no files are named"),
        ({"path": "nosuch://place/x"}, "no file system is known for nosuch://"),
        ({"path": "b", "filesystem": 3}, "Source.filesystem is of int"),
    ],
)
def test_nothing_found_is_refused(tree: Path, source: dict[str, object], words: str) -> None:
    path = source["path"]
    given = {**source, "path": path.format(tree=tree) if isinstance(path, str) else path}
    with pytest.raises(DataError, match=words.replace("{tree}", str(tree))) as refused:
        locate(Source(**given))
    assert refused.value.hint


def test_a_link_to_nothing_is_not_left_out(tree: Path) -> None:
    (tree / "b/broken.csv").symlink_to(tree / "gone.csv")
    with pytest.raises(DataError, match=r"'.*broken.csv' is a link to nothing"):
        locate(Source(path=str(tree / "b")))


def test_links_to_directories_are_followed_once(tree: Path) -> None:
    (tree / "b/loop").symlink_to(tree / "b")
    (tree / "b/other").symlink_to(tree / "a/x")
    files = locate(Source(path=str(tree / "b")))
    assert names(tree, files) == ["b/1.csv", "b/2.csv", "b/other/3.csv"]


def test_hdfs_without_its_library_says_what_to_install() -> None:
    with pytest.raises(DataError, match="Hadoop's native library is missing") as refused:
        locate(Source(path="hdfs://me:hunter2@namenode:8020/data"))
    assert "libhdfs" in refused.value.hint
    assert "JAVA_HOME" in refused.value.hint
    assert "hunter2" not in str(refused.value)


def test_a_missing_package_is_named() -> None:
    assert "paramiko" not in sys.modules
    with pytest.raises(DataError, match=r'sftp:// needs a package.*"paramiko"') as refused:
        locate(Source(path="sftp://me:hunter2@host/data"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("secret", ["hun/ter2", "hun@ter2"])
def test_a_secret_that_is_not_escaped_is_not_told(secret: str) -> None:
    with pytest.raises(DataError, match="'s3://bucket/a") as refused:
        locate(Source(path=f"s3://KEYKEYKEY:{secret}@bucket/a"), pause=lambda _: None)
    assert "%2F" in refused.value.hint
    for part in ("hun", "ter2", "KEYKEYKEY"):
        assert part not in str(refused.value)
    assert refused.value.__cause__ is None


def test_files_of_an_fsspec_file_system() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/h3/a.csv": b"x\n1\n", "/h3/deep/b.csv": b"x\n2\n"})
    try:
        files = locate(Source(path="memory://h3"))
        assert [file.path for file in files] == ["memory://h3/a.csv", "memory://h3/deep/b.csv"]
        assert not is_local(files[0].path)
        for source in (
            Source(path="memory://h3/*.csv"),
            Source(path="/h3/a.csv", filesystem=memory),
            Source(path="/h3/*.csv", filesystem=fs.PyFileSystem(fs.FSSpecHandler(memory))),
        ):
            (found,) = locate(source)
            assert found.path == "memory://h3/a.csv"
            with open_file(source, found.path) as file:
                assert (file.size(), file.read(2), file.read_at(2, 2)) == (4, b"x\n", b"1\n")
        memory.pipe("/h3/c.csv", b"x\n3\n")
        assert len(locate(Source(path="memory://h3"))) == 3
    finally:
        memory.rm("/h3", recursive=True)


def test_a_given_local_file_system(tree: Path) -> None:
    source = Source(path=str(tree / "b"), filesystem=fs.LocalFileSystem())
    assert names(tree, locate(source)) == ["b/1.csv", "b/2.csv"]
    below = Source(path="b", filesystem=fs.SubTreeFileSystem(str(tree), fs.LocalFileSystem()))
    assert [file.path for file in locate(below)] == ["subtree://b/1.csv", "subtree://b/2.csv"]
    with open_file(below, "subtree://b/1.csv") as file:
        assert file.read() == b"b/1.csv"


def test_a_file_that_is_gone(tree: Path) -> None:
    with pytest.raises(DataError, match=r"'.*/b/9.csv' is not there"):
        open_file(Source(path=str(tree)), str(tree / "b/9.csv"))
    with pytest.raises(DataError, match="'memory://other/a' does not belong to 'memory://h3'"):
        open_file(Source(path="memory://h3"), "memory://other/a")


class Flaky:
    """Fails as often as it is told to."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def dressed(status: int) -> FileNotFoundError:
    inner = RuntimeError(f"answer of {status}")
    inner.status = status  # type: ignore[attr-defined]
    error = FileNotFoundError("http://host/a")
    error.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (OSError("AWS Error SLOW_DOWN during GetObject operation"), True),
        (OSError("AWS Error UNKNOWN (HTTP status 502) during HeadObject"), True),
        (dressed(503), True),
        (dressed(429), True),
        (dressed(404), False),
        (OSError("HTTP status 403"), False),
        (FileNotFoundError("nope"), False),
        (PermissionError("no"), False),
        (pa.ArrowInvalid("not 503 bytes"), False),
        (OSError("503 bytes are too few"), False),
    ],
)
def test_what_is_tried_again(error: Exception, passing: bool) -> None:
    assert is_transient(error) == passing
    waits: list[float] = []
    if passing:
        assert with_retries(Flaky([error, error]), waits.append) == "done"
        assert waits == [0.5, 2.0]
        with pytest.raises(type(error)):
            with_retries(Flaky([error] * 3), waits.append)
    else:
        with pytest.raises(type(error)):
            with_retries(Flaky([error]), waits.append)
        assert waits == []


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = OSError("a")
    error.__cause__ = OSError("b")
    error.__cause__.__cause__ = error
    assert not is_transient(error)
    assert status_of(error) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/a@b:c", "/data/a@b:c"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        (
            "s3://k:s@bucket/a?endpoint_override=http://h:1",
            "s3://bucket/a?endpoint_override=http://h:1",
        ),
        ("https://h/a?X-Amz-Signature=abc&part=2", "https://h/a?X-Amz-Signature=[redacted]&part=2"),
        ("https://token@h/a", "https://h/a"),
    ],
)
def test_a_url_without_credentials(url: str, expected: str) -> None:
    assert without_credentials(url) == expected


def test_secrets_are_taken_out_of_messages() -> None:
    url = "s3://KEYKEYKEY:a%2Fbcd@bucket?token=tok123"
    text = redacted("bad a/bcd or a%2Fbcd or tok123 of KEYKEYKEY at http://x:yyy@host/", [url])
    for secret in ("bcd", "tok123", "KEYKEYKEY", "yyy"):
        assert secret not in text
