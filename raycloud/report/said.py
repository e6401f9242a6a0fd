"""What a member of a run on this machine logged: `logs/member-N.jsonl` as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raycloud.bounded import json_value, open_regular, text_lines
from raycloud.errors import RunDirectoryError
from raycloud.report.figures import printable_line

LOGS = "logs"  # below the run directory


def member_lines(directory: Path, member: int, *, raw: bool) -> Iterator[str]:
    """The lines of a member's log; `raw` as they are kept.

    Raises:
        RunDirectoryError: The member has logged nothing, or its log cannot be read.
    """
    path = directory / LOGS / f"member-{member}.jsonl"
    try:
        file = open_regular(path)
    except OSError as error:
        there = sorted(p.stem.removeprefix("member-") for p in path.parent.glob("member-*.jsonl"))
        known = f"members that have: {', '.join(there)}" if there else "no member has"
        raise RunDirectoryError(
            f"member {member} of {directory} has logged nothing", hint=known
        ) from error
    with file:
        try:
            for line in text_lines(file):
                yield line.rstrip("\n") if raw else entry_text(line)
        except ValueError as error:
            raise RunDirectoryError(
                f"{path} cannot be read: {error}", hint="it is damaged: move it away"
            ) from error


def entry_text(line: str) -> str:
    """An entry as a line for people; what is no entry, as it stands.

    >>> entry_text('{"t":0,"level":"INFO","logger":"my.task","message":"hello","step":3}')
    '00:00:00 INFO my.task: hello (step 3)'
    """
    try:
        entry: Any = json_value(line, constants=True)
        at = datetime.fromtimestamp(float(entry["t"]), tz=UTC).strftime("%H:%M:%S")
        text = f"{at} {entry['level']} {entry['logger']}: {entry['message']}"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return printable_line(line)
    step = entry.get("step")
    return printable_line(text if step is None else f"{text} (step {step})")
