"""The members' logs in a run directory: `logs/member-N.jsonl`, a JSON object per line.

`{"format":1,"t":unix seconds,"level":"INFO","logger":name,"message":text,"step":n or null}`. A file
that has grown to 16 MiB becomes `member-N.1.jsonl`, in the place of the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from raycloud.redact import redact
from raycloud.report.log import cut_torn_line

MOST_BYTES = 16 * 2**20


class Journals:
    """Writes the members' logs of one run.

    Args:
        folder: Where the files go; made with the first line.
        most_bytes: Size at which a file is put aside.
    """

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        """Nothing is written yet."""
        self._folder, self._most_bytes = folder, most_bytes
        self._seen: set[int] = set()

    def write(self, member: int, lines: Iterable[str]) -> None:
        """Append lines, given without their newlines.

        Raises:
            OSError: They cannot be written.
        """
        path = self._folder / f"member-{member}.jsonl"
        if member not in self._seen:
            self._folder.mkdir(exist_ok=True)
            cut_torn_line(path)
            self._seen.add(member)
        records = (redact(json.loads(line)) for line in lines)  # of a node that may know less
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            size = file.tell()
        if size >= self._most_bytes:
            path.replace(path.with_suffix(".1.jsonl"))
