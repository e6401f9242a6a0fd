"""What the shell offers after Tab: job files, runs, and fields of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raycloud.bounded import expanded, open_regular

_RUNS = "runs"
_RUN_FILES = ("events.jsonl", "job.yaml")
_MOST_BYTES = 2**16  # that are looked at of a file


def complete_job(incomplete: str) -> list[str]:
    """Job files, and folders that may hold some.

    A YAML file counts as a job when a line of it begins with `task:`.
    """
    found = []
    for path, text in _entries(incomplete):
        if _is_folder(path):
            found.append(f"{text}/")
        elif path.suffix in {".yaml", ".yml"} and _is_job(path):
            found.append(text)
    return found


def complete_run(incomplete: str) -> list[str]:
    """Directories of runs: those below `runs/`, newest first, or what is being typed."""
    if incomplete and not _RUNS.startswith(incomplete):
        runs = [(path, text) for path, text in _entries(incomplete) if _is_folder(path)]
        return [text if _is_run(path) else f"{text}/" for path, text in runs]
    try:
        here = [path for path in Path(_RUNS).iterdir() if _is_run(path)]
        return [str(path) for path in sorted(here, key=_age)]
    except OSError:
        return []


def complete_field(incomplete: str) -> list[tuple[str, str]]:
    """`field=value` for `--set`: each word a field takes, else its default, which one changes."""
    from raycloud.spec.job import Job
    from raycloud.spec.schema import schema_of, settable

    return [offer for offer in settable(schema_of(Job)) if offer[0].startswith(incomplete)]


def _entries(incomplete: str) -> Iterator[tuple[Path, str]]:
    """What there is whose path begins with what is typed, as a path and as it would be typed."""
    head, slash, name = incomplete.rpartition("/")
    try:
        paths = sorted(expanded(Path(head + slash or ".")).iterdir())
    except OSError:
        return
    for path in paths:
        if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith(".")):
            yield path, f"{head}{slash}{path.name}"


def _is_job(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return any(line.startswith(b"task:") for line in file.read(_MOST_BYTES).splitlines())
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # behind a folder that may not be looked into
        return False


def _is_run(path: Path) -> bool:
    try:
        return any((path / name).is_file() for name in _RUN_FILES)
    except OSError:
        return False


def _age(path: Path) -> float:
    return -path.stat().st_mtime
