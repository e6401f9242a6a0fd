"""Working directories that would send what lies outside, or never be done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycloud.errors import SpecError
from raycloud.on_ray.submission import packed_by_ray
from raycloud.packing.working_dir import check_travels, survey
from tests.hostile_forks import Case


def _case(change: Callable[[Path], Any], says: str, needed: str = "job.yaml") -> Case:
    def make(folder: Path) -> None:
        (folder / "project").mkdir()
        change(folder / "project")

    def act(folder: Path) -> None:
        found = survey(folder / "project", packed_by_ray)
        check_travels(folder / "project" / needed, found)

    return Case(make=make, open=act, error=SpecError, says=says)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _deep(path: Path) -> None:
    for _ in range(200):
        path = path / "a"
        path.mkdir()


CASES = {
    "a link outside": _case(
        lambda path: (path / "job.yaml").symlink_to("../../outside/secret.txt"), "job.yaml"
    ),
    "a link to the whole disk": _case(
        lambda path: (path / "disk").symlink_to("/"), "disk", "disk/etc/passwd"
    ),
    "a link to itself": _case(lambda path: (path / "job.yaml").symlink_to("job.yaml"), "job.yaml"),
    "a needed file that climbs": _case(lambda path: None, "secret.txt", "../../outside/secret.txt"),
    "a pipe": _case(lambda path: os.mkfifo(path / "job.yaml"), "job.yaml"),
    "a private key": _case(
        lambda path: (path / "job.yaml").write_text(
            "-----BEGIN RSA PRIVATE " + "KEY-----\n" + "a7" * 200
        ),
        "job.yaml",
    ),
    "a file of 1 TB": _case(lambda path: _sparse(path / "data"), "data"),
    "folders in folders": _case(_deep, "job.yaml"),
}
