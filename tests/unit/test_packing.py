"""The archive that travels: what is in it, what stays and why, and the same bytes each time."""

from __future__ import annotations

import io
import os
import shutil
import socket
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.packing import Package, pack

GITHUB = "ghp_" + "a1B2" * 9
HUGGING_FACE = "hf_" + "aB3d" * 8
AWS = "AKIA" + "ABCDEFGH12345678"
KEY = (
    "-----BEGIN OPENSSH "
    + "PRIVATE KEY-----\n"
    + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAA\n"
)


def written(root: Path, **files: str) -> Path:
    """A directory with these files; `__` in a name is a slash."""
    for name, text in files.items():
        write(root, name.replace("__", "/") + ".py", text)
    return root


def write(root: Path, path: str, text: str = "x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def names(package: Package) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def why(package: Package) -> dict[str, str]:
    return {left.path: left.reason for left in package.survey.left}


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first = written(tmp_path / "first", b="1", a="2", deep__c="3")
    second = written(tmp_path / "second", deep__c="3", a="2", b="1")
    os.utime(second / "a.py", (1, 1))
    (second / "b.py").chmod(0o600)
    packed, again = pack(first), pack(second)
    assert packed.data == again.data
    assert packed.sha256 == again.sha256
    assert names(packed) == ["a.py", "b.py", "deep/c.py"]


def test_bytes_and_the_executable_bit_arrive(tmp_path: Path) -> None:
    write(tmp_path, "run.sh", "#!/bin/sh\n").chmod(0o700)
    (tmp_path / "table.bin").write_bytes(bytes(range(256)) * 9)
    with zipfile.ZipFile(io.BytesIO(pack(tmp_path).data)) as archive:
        assert archive.read("table.bin") == bytes(range(256)) * 9
        modes = {e.filename: e.external_attr >> 16 for e in archive.infolist()}
    assert modes == {"run.sh": stat.S_IFREG | 0o755, "table.bin": stat.S_IFREG | 0o644}


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", "node_modules/x/index.js", "pkg/__pycache__/a.pyc",
        "runs/gpt-1/job.yaml", "wandb/latest", ".mypy_cache/x", "deep/.pytest_cache/x", "a.pyc",
    ],
)  # fmt: skip
def test_what_nobody_needs_stays_without_a_word(tmp_path: Path, path: str) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, path)
    package = pack(tmp_path)
    assert names(package) == ["a.py"]
    assert package.told == ()


@pytest.mark.parametrize(
    "path",
    [
        ".env", ".env.production", "app/.envrc", "prod.env", "server.pem", "tls/server.KEY",
        "id_rsa", "id_ed25519.bak", ".netrc", ".pypirc", ".npmrc", ".git-credentials",
        "credentials", "credentials.json", "my-service-account-1.json", "client_secret_2.json",
        "secrets.yaml", "auth_token", "kubeconfig", ".ssh/config", ".aws/config", ".ray/x",
    ],
)  # fmt: skip
def test_secrets_stay_by_name_and_that_is_told(tmp_path: Path, path: str) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, path)
    write(tmp_path, ".raycloudignore", f"!{path}\n")  # not even when asked
    package = pack(tmp_path)
    assert names(package) == [".raycloudignore", "a.py"]
    (left,) = package.told
    assert "by its name" in left.reason


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"x = 1\ntoken = '{GITHUB}'\n", "a GitHub token, line 2"),
        (f"login('{HUGGING_FACE}')", "a Hugging Face token, line 1"),
        (f"\n\nkey: {AWS}\n", "an AWS access key, line 3"),
        (KEY, "a private key, line 1"),
        ('{"private_key": "' + KEY.replace("\n", "\\n") + '"}', "a private key, line 1"),
        ("aws_secret_access_key = " + "aB1/" * 10, "an AWS secret key, line 1"),
        ("sk-ant-" + "api03-" + "aB12" * 8, "an API key, line 1"),
        ("AIza" + "aB12x" * 7, "a Google API key, line 1"),
    ],
)
def test_secrets_stay_by_what_they_hold(tmp_path: Path, text: str, what: str) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "notes.txt", text)
    package = pack(tmp_path)
    assert names(package) == ["a.py"]
    assert why(package) == {"notes.txt": f"holds what looks like {what}"}
    assert [left.path for left in package.told] == ["notes.txt"]


@pytest.mark.parametrize(
    "text",
    [
        "re.compile('-----BEGIN [A-Z ]*PRIVATE KEY-----')",
        ".sk-toggleable__label-arrow:before { }",
        "os.environ['AWS_SECRET_ACCESS_KEY']",
        "token = os.environ['HF_TOKEN']",
        "0" * 64,
    ],
)
def test_code_about_secrets_travels(tmp_path: Path, text: str) -> None:
    write(tmp_path, "a.py", text)
    assert names(pack(tmp_path)) == ["a.py"]


def test_directories_are_known_by_what_marks_them(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "python/pyvenv.cfg")
    write(tmp_path, "conda/conda-meta/history")
    write(tmp_path, "tiles/CACHEDIR.TAG")
    write(tmp_path, "out/job.yaml")
    write(tmp_path, "out/events.jsonl")
    write(tmp_path, "rows/part-0")
    package = pack(tmp_path, also=(tmp_path / "rows",))
    assert names(package) == ["a.py"]
    assert why(package) == {
        "conda/": "a conda environment",
        "out/": "a run",
        "python/": "a virtual environment",
        "rows/": "a cache of data",
        "tiles/": "a cache",
    }
    assert package.told == ()


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path: that of a socket ends at 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_only_files_and_links_within_travel(short: Path) -> None:
    root = short / "work"
    write(root, "a.py", "inside")
    write(short, "outside.txt", "outside")
    write(root, ".env", "secret")
    write(root, ".git/config", "history")
    (root / "again.py").symlink_to("a.py")
    (root / "leads-out").symlink_to(short / "outside.txt")
    (root / "leads-out-too").symlink_to("../outside.txt")
    (root / "to-secret").symlink_to(".env")
    (root / "to-history").symlink_to(".git/config")
    (root / "nowhere").symlink_to("gone")
    (root / "loop").symlink_to("loop")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(root / "socket"))
        package = pack(root)
    assert names(package) == ["a.py", "again.py"]
    with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
        assert archive.read("again.py") == b"inside"
        assert all(stat.S_ISREG(e.external_attr >> 16) for e in archive.infolist())
    assert {left.path: left.reason for left in package.told} == {
        ".env": "a secret, by its name",
        "leads-out": "a link that leads outside",
        "leads-out-too": "a link that leads outside",
        "loop": "a link that leads nowhere",
        "nowhere": "a link that leads nowhere",
        "pipe": "a socket, device or pipe",
        "socket": "a socket, device or pipe",
        "to-history": "a link to what stays",
        "to-secret": "a link to what stays",
        "up": "a link that leads outside",
    }


def test_a_link_brings_in_nothing_that_stays_where_it_lies(tmp_path: Path) -> None:
    """Also what rules deeper down leave out; and nothing stays for the rules above a link."""
    write(tmp_path, "data/.gitignore", "*.bin\n")
    write(tmp_path, "data/a.bin")
    write(tmp_path, "data/a.csv")
    write(tmp_path, "data/deep/.raycloudignore", "!kept.bin\n")
    write(tmp_path, "data/deep/kept.bin")
    write(tmp_path, "runs/one/log.txt")
    (tmp_path / "links").mkdir()
    for name in ("data/a.bin", "data/a.csv", "data/deep/kept.bin", "runs/one/log.txt"):
        (tmp_path / "links" / Path(name).name).symlink_to(Path("..") / name)
    (tmp_path / "links/again.csv").symlink_to("a.csv")
    package = pack(tmp_path)
    assert [name for name in names(package) if name.startswith("links/")] == [
        "links/a.csv", "links/again.csv", "links/kept.bin",
    ]  # fmt: skip
    assert why(package)["links/a.bin"] == why(package)["links/log.txt"] == "a link to what stays"


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "data/big.bin", "x" * 3 * 2**20)
    write(tmp_path, "data/small.bin", "x" * 2**20)
    with pytest.raises(SpecError) as raised:
        pack(tmp_path, largest_bytes=2 * 2**20)
    assert "holds 4.0 MiB in 3 files, and 2.0 MiB may travel" in raised.value.message
    assert "the largest: data/big.bin (3.0 MiB), data/small.bin (1.0 MiB)" in raised.value.message
    assert ".raycloudignore" in raised.value.hint
    write(tmp_path, ".raycloudignore", "big.bin\n")
    assert names(pack(tmp_path, largest_bytes=2 * 2**20)) == [
        ".raycloudignore", "a.py", "data/small.bin",
    ]  # fmt: skip


def test_a_needed_file_that_stays_is_an_error(tmp_path: Path) -> None:
    task = write(tmp_path, "task.py", f"login('{GITHUB}')")
    with pytest.raises(SpecError, match=r"task\.py.*does not travel.*GitHub token") as raised:
        pack(tmp_path, needed=[task])
    assert "environment" in raised.value.hint
    write(tmp_path, "task.py", "x")
    write(tmp_path, ".gitignore", "task.py\n")
    with pytest.raises(SpecError, match=r"does not travel: by \.gitignore"):
        pack(tmp_path, needed=[task])
    write(tmp_path, ".raycloudignore", "!task.py\n")
    assert "task.py" in names(pack(tmp_path, needed=[task]))
    with pytest.raises(SpecError, match="does not hold"):
        pack(tmp_path, needed=[tmp_path.parent / "other.py"])


def test_a_directory_that_is_no_project_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (tmp_path, Path("/"), write(tmp_path, "a.py"), tmp_path / "gone"):
        with pytest.raises(SpecError, match="--working-dir"):
            pack(place)


def test_odd_names_stay(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "..\\..\\evil.py")
    write(tmp_path, "line\nbreak.py")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).write_text("x")
    assert names(pack(tmp_path)) == ["a.py"]
