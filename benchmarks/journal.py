"""What each worker notes while it trains on the testbed, the same way in every contestant.

A worker may be killed at any moment, so it appends: one line per update, right after the
optimizer's step, in one write. Seconds are those of the machine's monotonic clock, which all of a
testbed's namespaces share. Every few updates the parameters are kept as well, by whichever worker
is first; their held-out loss is computed afterwards, outside every worker's quota. Where a training
goes back and computes an update again, its parameters take the place of those that were lost.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT = 1
SNAPSHOT_EVERY = 5  # updates
NODE = "TESTBED_NODE"  # the variable that names the node a process runs on


@dataclass(frozen=True, kw_only=True)
class Note:
    """One update, as one worker saw it.

    Attributes:
        t_s: When its optimizer had stepped.
        update: Which update of the whole training, from 1.
        samples: Of all participants together.
        cpu_s: CPU seconds of this process until then.
    """

    t_s: float
    update: int
    samples: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerJournal:
    """One process's notes in the order of writing."""

    node: str
    pid: int
    started_s: float
    notes: tuple[Note, ...]


class Journal:
    """The journal of this process.

    Args:
        directory: Where journals go, one file per process.
        snapshots: Where parameters go; None keeps none.
    """

    def __init__(self, directory: Path, *, snapshots: Path | None = None) -> None:
        self._node = os.environ.get(NODE, "local")
        self._snapshots = snapshots
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self._node}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._since_s = _now_s()  # what was kept before is of a course that this one has left
        self._update = 0
        self._write(
            {"format": FORMAT, "node": self._node, "pid": os.getpid(), "t_s": self._since_s}
        )

    def note(self, *, update: int, samples: int) -> None:
        """Update `update`, of `samples` samples of all participants together, is done."""
        now_s = _now_s()
        if update <= self._update:  # it went back
            self._since_s = now_s
        self._update = update
        self._write(
            {"t_s": now_s, "update": update, "samples": samples, "cpu_s": time.process_time()}
        )

    def snapshot(self, model: nn.Module, update: int, *, every: int = SNAPSHOT_EVERY) -> None:
        """Keep the parameters after `update` if it is one of every `every` and nobody has yet.

        Who keeps them claims them before. A claim of before this process began, or went back, was
        made on a course that was lost, whether it was followed by parameters or by a kill: the next
        number is free.
        """
        if self._snapshots is None or update % every:
            return
        self._snapshots.mkdir(parents=True, exist_ok=True)
        claims_s = _claims_s(self._snapshots, update)
        if claims_s and claims_s[-1] >= self._since_s:
            return
        claim = _claim(self._snapshots, update, len(claims_s))
        try:
            claim.symlink_to(repr(_now_s()))  # it appears together with its text, as no file does
        except FileExistsError:
            return
        draft = claim.with_suffix(".draft")
        save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, draft)
        draft.rename(claim.with_suffix(".safetensors"))

    def _write(self, record: dict[str, object]) -> None:
        os.write(self._file, json.dumps(record).encode() + b"\n")


def read(directory: Path) -> tuple[WorkerJournal, ...]:
    """All workers' journals, by file name; a line cut short by a kill is left out."""
    return tuple(
        found
        for path in sorted(directory.glob("*.jsonl"))
        if (found := _read_one(path)) is not None
    )


def _read_one(path: Path) -> WorkerJournal | None:
    records = list(_records(path.read_bytes()))
    if not records:
        return None
    head, *rest = records
    if head.get("format") != FORMAT:
        raise ValueError(f"{path}: format {head.get('format')}, expected {FORMAT}")
    return WorkerJournal(
        node=head["node"],
        pid=head["pid"],
        started_s=head["t_s"],
        notes=tuple(Note(**record) for record in rest),
    )


def _records(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n")[:-1]:  # what follows the last newline is cut short
        yield json.loads(line)


def snapshots(directory: Path) -> tuple[tuple[int, Path], ...]:
    """(update, file) of all parameters that were kept, by update; none that were lost later."""
    newest: dict[int, int] = {}
    for claim in directory.glob("*.claim"):
        update, number = map(int, claim.stem.split("-"))
        newest[update] = max(number, newest.get(update, 0))
    paths = {u: _claim(directory, u, n).with_suffix(".safetensors") for u, n in newest.items()}
    return tuple((update, path) for update, path in sorted(paths.items()) if path.exists())


def load_snapshot(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The parameters in a snapshot.

    Raises:
        ValueError: They are not those of `names`.
    """
    found = load_file(path)
    if set(found) != set(names):
        raise ValueError(f"{path}: holds {sorted(found)}, expected {sorted(names)}")
    return found


def _claim(directory: Path, update: int, number: int) -> Path:
    return directory / f"{update:06d}-{number}.claim"


def _claims_s(directory: Path, update: int) -> list[float]:
    """When the parameters of an update were claimed, by number."""
    found: list[float] = []
    for number in itertools.count():
        try:
            found.append(float(_claim(directory, update, number).readlink().name))
        except FileNotFoundError:
            break
    return found


def _now_s() -> float:
    return time.monotonic()
