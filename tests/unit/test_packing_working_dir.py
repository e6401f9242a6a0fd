"""What of a working directory travels, and what stays and why; Ray packs what was checked."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import SpecError
from raycloud.on_ray.submission import packed_by_ray
from raycloud.packing.working_dir import WorkingDir, copied, ignored_above, survey

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


def looked(root: Path, **settings: Any) -> WorkingDir:
    return survey(root, packed_by_ray, **settings)


def names(found: WorkingDir) -> list[str]:
    return list(found.sizes)


def test_what_is_checked_is_what_ray_packs(tmp_path: Path) -> None:
    """Ray's own packing of the copy that it is given, file by file and byte by byte."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    root = tmp_path / "project"
    for path in (
        "a.py", "deep/b.py", "deep/.env", "x #1! [a]*?.pem", "x 1.pem2", "ignored.bin",
        "deep/c.bin", "deep/kept.csv", "rows.csv", ".git/config", "venv/lib.py", "trailing .key",
        "runs/1/log", "id_rsa ", "a.pem\n",
    ):  # fmt: skip
        write(root, path)
    write(root, ".gitignore", "*.bin\n/rows.csv\n")
    write(root, "deep/.rayignore", "*.csv\n")
    write(root, "token.txt", GITHUB)
    write(root, "token.txt ", GITHUB)
    (root / "again.py").symlink_to("a.py")
    (root / "up").symlink_to("..")
    found = looked(root)
    defaults = get_runtime_env_default_excludes()
    with copied(found) as copy:
        create_package(str(copy), tmp_path / "p.zip", include_gitignore=True, excludes=defaults)
    assert not copy.exists()
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        packed = {one.filename: one.file_size for one in archive.infolist() if not one.is_dir()}
    assert packed == found.sizes
    assert sorted(packed) == [
        ".gitignore", "a.py", "again.py", "deep/.rayignore", "deep/b.py", "x 1.pem2",
    ]  # fmt: skip


@pytest.mark.parametrize("becomes", ["a secret", "a link", "nothing", "a pipe"])
def test_what_changes_after_it_was_checked_does_not_travel(tmp_path: Path, becomes: str) -> None:
    root = tmp_path / "project"
    file = write(root, "a.py")
    found = looked(root)
    file.unlink()
    if becomes == "a secret":
        file.write_text(f"token = '{GITHUB}'")
    elif becomes == "a link":
        file.symlink_to(write(tmp_path, "outside.py"))
    elif becomes == "a pipe":
        os.mkfifo(file)
    changed = r"a\.py.*(has changed while it was sent|cannot be read)"
    with pytest.raises(SpecError, match=changed), copied(found):
        pass


def test_ignore_files_above_are_named(tmp_path: Path) -> None:
    write(tmp_path, ".git/config")
    above = write(tmp_path, ".gitignore", "private/\n")
    write(tmp_path, "train/.gitignore", "*.bin\n")
    assert ignored_above(tmp_path / "train") == [above]
    assert ignored_above(tmp_path) == []


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
    found = looked(tmp_path)
    assert names(found) == ["a.py"]
    assert found.told == {}


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
    write(tmp_path, ".rayignore", f"!{path}\n")  # not even when asked
    found = looked(tmp_path)
    assert names(found) == [".rayignore", "a.py"]
    (reason,) = found.told.values()
    assert "by its name" in reason


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
    found = looked(tmp_path)
    assert names(found) == ["a.py"]
    assert found.left == {"notes.txt": f"holds what looks like {what}"}
    assert list(found.told) == ["notes.txt"]


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
    assert names(looked(tmp_path)) == ["a.py"]


def test_directories_are_known_by_what_marks_them(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "python/pyvenv.cfg")
    write(tmp_path, "conda/conda-meta/history")
    write(tmp_path, "tiles/CACHEDIR.TAG")
    write(tmp_path, "out/job.yaml")
    write(tmp_path, "out/events.jsonl")
    write(tmp_path, "rows/part-0")
    found = looked(tmp_path, also={tmp_path / "rows"})
    assert names(found) == ["a.py"]
    assert found.left == {
        "conda": "a conda environment",
        "out": "a run",
        "python": "a virtual environment",
        "rows": "a cache of data",
        "tiles": "a cache",
    }
    assert found.told == {}


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
        found = looked(root)
    assert names(found) == ["a.py", "again.py"]
    assert found.told == {
        ".env": "a secret, by its name",
        "leads-out": "a link that leads outside",
        "leads-out-too": "a link that leads outside",
        "loop": "a link that leads nowhere",
        "nowhere": "a link that leads nowhere",
        "to-history": "a link to what stays",
        "to-secret": "a link to what stays",
        "up": "a link that leads outside",
    }


def test_a_link_brings_in_nothing_that_stays_where_it_lies(tmp_path: Path) -> None:
    write(tmp_path, "data/.gitignore", "*.bin\n")
    write(tmp_path, "data/a.bin")
    write(tmp_path, "data/a.csv")
    write(tmp_path, "runs/one/log.txt")
    (tmp_path / "links").mkdir()
    for name in ("data/a.bin", "data/a.csv", "runs/one/log.txt"):
        (tmp_path / "links" / Path(name).name).symlink_to(Path("..") / name)
    (tmp_path / "links/again.csv").symlink_to("a.csv")
    found = looked(tmp_path)
    assert [name for name in names(found) if name.startswith("links/")] == [
        "links/a.csv", "links/again.csv",
    ]  # fmt: skip
    assert found.left["links/a.bin"] == found.left["links/log.txt"] == "a link to what stays"


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "data/big.bin", "x" * 3 * 2**20)
    write(tmp_path, "data/small.bin", "x" * 2**20)
    with pytest.raises(SpecError) as raised:
        looked(tmp_path, largest_bytes=2 * 2**20)
    assert "holds 4.0 MiB in 3 files, and 2.0 MiB may travel" in raised.value.message
    assert "the largest: data/big.bin (3.0 MiB), data/small.bin (1.0 MiB)" in raised.value.message
    assert ".rayignore" in raised.value.hint
    write(tmp_path, ".rayignore", "big.bin\n")
    assert names(looked(tmp_path, largest_bytes=2 * 2**20)) == [
        ".rayignore", "a.py", "data/small.bin",
    ]  # fmt: skip


def test_an_ignore_file_that_nobody_reads_any_more_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "data/.raycloudignore", "*.bin\n")
    with pytest.raises(SpecError, match=r"data/\.raycloudignore") as raised:
        looked(tmp_path)
    assert "rename it to .rayignore" in raised.value.hint


def test_a_directory_that_is_no_project_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (tmp_path, Path("/"), write(tmp_path, "a.py"), tmp_path / "gone"):
        with pytest.raises(SpecError, match="--working-dir"):
            looked(place)


def test_odd_names_stay(tmp_path: Path) -> None:
    write(tmp_path, "a.py")
    write(tmp_path, "..\\..\\evil.py")
    write(tmp_path, "line\nbreak.py")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).write_text("x")
    assert names(looked(tmp_path)) == ["a.py"]
