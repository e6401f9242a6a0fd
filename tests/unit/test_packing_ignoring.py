"""Ignore files, with git's rules; each case was held against git itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raycloud.packing import survey
from raycloud.packing.ignoring import ignored_by, rules_of


def travels(root: Path, *paths: str) -> list[str]:
    """Which of these files travel."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")
    found = {file.path for file in survey(root).files}
    return [path for path in paths if path in found]


@pytest.mark.parametrize(
    ("said", "stay", "travel"),
    [
        ("*.bin", ["a.bin", "d/e/a.bin"], ["a.bins", "bin"]),
        ("/a.txt", ["a.txt"], ["d/a.txt"]),
        ("d/a.txt", ["d/a.txt"], ["e/d/a.txt"]),
        ("data/", ["data/a", "d/data/b/c"], ["d/data.txt"]),
        ("**/tmp/*.x", ["tmp/a.x", "d/e/tmp/b.x"], ["tmp/d/a.x"]),
        ("d/**/f", ["d/f", "d/x/f", "d/x/y/f"], ["e/f"]),
        ("d/**", ["d/f", "d/x/y"], ["e/d/x"]),
        ("**", ["a", "d/e"], []),
        ("?.py", ["a.py"], ["ab.py"]),
        ("[a-c].py", ["a.py", "d/c.py"], ["d.py"]),
        ("[!a].py", ["b.py"], ["a.py"]),
        ("[^a].py", ["b.py"], ["a.py"]),
        ("*\n!a.py", ["b.py"], ["a.py"]),
        ("d/\n!d/a.py", ["d/a.py"], []),
        ("!a.py\na.py", ["a.py"], []),
        ("# a\n\\#a\n\\!b", ["#a", "!b"], ["a", "b"]),
        ("a.py   \nb\\ ", ["a.py", "b "], []),
        ("[", ["["], ["a"]),
        ("[z-a]", [], ["z", "a"]),
        ("\r\na.py\r\n", ["a.py"], ["b.py"]),
        ("/", [], ["a"]),
    ],
)
def test_a_rule(tmp_path: Path, said: str, stay: list[str], travel: list[str]) -> None:
    (tmp_path / ".gitignore").write_bytes(said.encode())
    assert travels(tmp_path, *stay, *travel) == travel


def test_the_nearest_file_and_ours_decide(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / ".gitignore").write_text("*.csv\n/local.py\n")
    (tmp_path / "d/.gitignore").write_text("!keep.csv\n/here.py\n")
    (tmp_path / ".raycloudignore").write_text("!local.py\nextra.py\n")
    paths = ["a.csv", "d/keep.csv", "d/here.py", "here.py", "local.py", "extra.py"]
    assert travels(tmp_path, *paths) == ["d/keep.csv", "here.py", "local.py"]
    left = {one.path: one.reason for one in survey(tmp_path).left}
    assert left == {
        "a.csv": "by .gitignore",
        "d/here.py": "by d/.gitignore",
        "extra.py": "by .raycloudignore",
    }


def test_rules_from_the_top_of_the_repository_hold(tmp_path: Path) -> None:
    """As git has it: the nearest decides, and what is its own says least."""
    project = tmp_path / "top/group/project"
    (tmp_path / "top/.git/info").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*\n")  # of no repository
    (tmp_path / "top/.git/info/exclude").write_text("mine.txt\nback.txt\n")
    project.mkdir(parents=True)
    (tmp_path / "top/.gitignore").write_text("*.bin\n!back.txt\n/group/project/tied.txt\n")
    (tmp_path / "top/group/.gitignore").write_text("!kept.bin\n/project/near.txt\n/other.txt\n")
    (tmp_path / "top/group/.raycloudignore").write_text("ours.txt\n")
    (project / ".gitignore").write_text("!near.txt\n")
    stay = ["a.bin", "d/a.bin", "tied.txt", "mine.txt", "ours.txt"]
    travel = ["kept.bin", "d/kept.bin", "near.txt", "back.txt", "other.txt", "d/tied.txt"]
    assert travels(project, *stay, *travel) == travel
    assert {one.path: one.reason for one in survey(project).left} == {
        "a.bin": "by ../../.gitignore",
        "d/a.bin": "by ../../.gitignore",
        "mine.txt": "by ../../.git/info/exclude",
        "ours.txt": "by ../.raycloudignore",
        "tied.txt": "by ../../.gitignore",
    }


@pytest.mark.parametrize("place", [".", "sub"])
def test_what_is_a_repository_s_own_may_lie_elsewhere(tmp_path: Path, place: str) -> None:
    """`.git` of one of several working trees is a file."""
    tree = tmp_path / "tree"
    own = tmp_path / "main/.git"
    (own / "worktrees/tree").mkdir(parents=True)
    (own / "info").mkdir()
    (own / "info/exclude").write_text("mine.txt\n")
    (own / "worktrees/tree/commondir").write_text("../..\n")
    (tree / place).mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {own}/worktrees/tree\n")
    assert travels(tree / place, "mine.txt", "a.txt") == ["a.txt"]


@pytest.mark.parametrize("said", ["", "gitdir: gone\n", "gitdir: \0\n", "\xff" * 9000])
def test_an_odd_git_file_says_nothing(tmp_path: Path, said: str) -> None:
    (tmp_path / ".git").write_text(said)
    assert travels(tmp_path, "a.txt") == ["a.txt"]


def test_an_ignore_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("*.py\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    assert travels(tmp_path, "a.py") == ["a.py"]


def test_no_pattern_takes_long() -> None:
    """A regular expression that goes back would need years for these."""
    hostile = ["**/a/" * 60 + "b", "*a" * 120 + "b", "/".join(["**"] * 500) + "/x"]
    rules = rules_of("\n".join(hostile), source="x", folder="")
    path = "/".join(["a" * 250] * 16 + ["a"] * 100)
    began_s = time.process_time()
    assert ignored_by(path, rules, is_folder=False) is None
    assert time.process_time() - began_s < 1.0
