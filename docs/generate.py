"""Writes the pages that come from the code, or with `--check` tells which are out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import job_reference
import state_machine
import strategies
from pictures import PICTURES
from raycloud.spec.job import Job
from raycloud.spec.schema import render_schema

DOCS = Path(__file__).resolve().parent

PAGES: tuple[tuple[Path, Callable[[], str]], ...] = (
    (DOCS / "job-reference.md", job_reference.render),
    (DOCS / "job.schema.json", lambda: render_schema(Job)),
    (DOCS / "state-machine.md", state_machine.render),
    (DOCS / "strategies.md", strategies.render),
    *((DOCS / "pictures" / f"{name}.svg", draw) for name, draw in PICTURES.items()),
)


def main() -> int:
    """Write or check every page; the exit code is 1 where a check finds an old one."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; fail if a page is old")
    mode.add_argument("--write", action="store_true", help="write the pages (the default)")
    check = parser.parse_args().check
    old = [(path, text) for path, render in PAGES if _is_old(path, text := render())]
    for path, text in old:
        if check:
            print(f"{path.relative_to(DOCS.parent)} is not what the code says: run `make format`")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 1 if check and old else 0


def _is_old(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(main())
