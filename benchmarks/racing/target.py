"""Held-out losses of a run's snapshots, by a process of its own outside every quota.

    python -m benchmarks.racing.target --snapshots DIRECTORY --out FILE [--small]

It follows the directory, appends one line of JSON per snapshot to the file, and ends once its input
is closed and no snapshot is left.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.journal import load_snapshot, snapshots
from benchmarks.machine import ROOT
from benchmarks.racing.reference import held_out_loss
from benchmarks.workload import build_model, load_held_out

_NICENESS = 10
_LOOK_EVERY_S = 0.5


class EvaluationError(Exception):
    """The losses are not known, not even that the target was not reached; says why."""


def read_losses(path: Path, directory: Path) -> tuple[tuple[int, float], ...]:
    """(update, loss) of the snapshots evaluated so far, by update.

    Args:
        path: The file; a line that is half written is left out.
        directory: Of the snapshots: the loss of one that was lost since is left out too.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    losses = {found["file"]: found["loss"] for found in map(json.loads, lines)}
    kept = snapshots(directory)
    return tuple((update, losses[file.name]) for update, file in kept if file.name in losses)


class Evaluator:
    """A process that evaluates the snapshots of a directory from `start` to `finish`.

    Args:
        directory: Of the snapshots; it may come later.
        out: The file that `read_losses` reads.
        small: Whether they are of the tiny model.
        environment: All of the process's environment.
    """

    def __init__(
        self, directory: Path, out: Path, *, small: bool, environment: Mapping[str, str]
    ) -> None:
        self._directory, self._out = directory, out
        self._log = out.with_suffix(".log")
        self._command = [sys.executable, "-m", "benchmarks.racing.target"]
        self._command += ["--snapshots", str(directory), "--out", str(out)]
        self._command += ["--small"] * small
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; nothing happens where it runs."""
        if self._process is not None:
            return
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def losses(self) -> tuple[tuple[int, float], ...]:
        """Those known so far.

        Raises:
            EvaluationError: There will be no more.
        """
        if self._process is not None and self._process.poll() is not None:
            raise self._ended()
        return read_losses(self._out, self._directory)

    def finish(self, limit_s: float) -> None:
        """Let it evaluate what is left, and end.

        Args:
            limit_s: Seconds that it has for that.

        Raises:
            EvaluationError: It failed, or was late.
        """
        self.start()
        assert self._process is not None  # noqa: S101 - just started
        try:
            self._process.communicate(timeout=limit_s)  # closes its input
        except subprocess.TimeoutExpired:
            known = len(read_losses(self._out, self._directory))
            kept = len(snapshots(self._directory))
            raise EvaluationError(
                f"evaluated {known} of {kept} snapshots within {limit_s:g} s"
            ) from None
        if self._process.returncode:
            raise self._ended()

    def close(self) -> None:
        """End it where it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ended(self) -> EvaluationError:
        assert self._process is not None  # noqa: S101 - it has ended
        said = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        return EvaluationError(f"ended with status {self._process.returncode}: {said}")


def evaluate(directory: Path, out: Path, *, small: bool, over: Callable[[float], bool]) -> None:
    """Append the losses of all snapshots until it is over and none is left.

    Args:
        directory: Of the snapshots.
        out: The file.
        small: Whether they are of the tiny model.
        over: Whether there will be no more, after waiting that many seconds at most.
    """
    model = build_model(small=small)
    names = [name for name, _ in model.named_parameters()]
    held_out = load_held_out()
    done: set[Path] = set()
    last_round = False
    with out.open("a", encoding="utf-8", buffering=1) as lines:
        while True:
            new = [(u, path) for u, path in snapshots(directory) if path not in done]
            for update, path in new:
                model.load_state_dict(load_snapshot(path, names))
                loss = held_out_loss(model, held_out)
                found = {"update": update, "loss": loss, "file": path.name}
                lines.write(json.dumps(found) + "\n")
                done.add(path)
            if last_round:
                return
            last_round = over(0.0 if new else _LOOK_EVERY_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, out of everyone's way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--snapshots", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args(arguments)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    evaluate(asked.snapshots, asked.out, small=asked.small, over=_input_closed)
    return 0


def _input_closed(wait_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    sys.exit(main())
