"""Held-out losses of a run's snapshots, by a process of its own outside every quota.

    python -m benchmarks.racing.target --snapshots DIRECTORY --out FILE [--small]

It follows the directory, appends one line of JSON per snapshot to the file, and ends once its input
is closed and no snapshot is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.journal import load_snapshot, snapshots
from benchmarks.machine import ROOT
from benchmarks.racing.reference import held_out_loss
from benchmarks.workload import build_model, load_held_out

_NICENESS = 10
_LOOK_EVERY_S = 0.5


def read_losses(path: Path) -> tuple[tuple[int, float], ...]:
    """(update, loss) of the snapshots evaluated so far, by update; no line that is half written."""
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")[:-1]
    return tuple(sorted((found["update"], found["loss"]) for found in map(json.loads, lines)))


@contextlib.contextmanager
def following(
    directory: Path, out: Path, *, small: bool, environment: Mapping[str, str], finish_s: float
) -> Iterator[None]:
    """Evaluate the snapshots of `directory` into `out` while the block lasts, and those left after.

    Args:
        directory: Of the snapshots; it may come later.
        out: The file that `read_losses` reads.
        small: Whether they are of the tiny model.
        environment: All of the process's environment.
        finish_s: Seconds that it has for what is left.
    """
    command = [sys.executable, "-m", "benchmarks.racing.target"]
    command += ["--snapshots", str(directory), "--out", str(out), *(["--small"] * small)]
    with out.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=finish_s)  # closes its input
    finally:
        process.kill()
        process.communicate()


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
                lines.write(json.dumps({"update": update, "loss": loss}) + "\n")
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
