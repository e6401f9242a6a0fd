"""Parameter histories of runs on a real Ray, with faults: recorded before a change, compared after.

    python -m tests.histories record FILE
    python -m tests.histories compare BEFORE AFTER

Shares and faults are fixed, so a history is the same each time, bit by bit; a change that is to
keep every result keeps them. They follow from the processor: record both sides on one machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

import raycloud
from raycloud import Job
from raycloud.checkpoint import load, open_store, steps
from raycloud.checkpoint.payload import load_tensors
from raycloud.order import Position, Steps
from raycloud.step.state import digest
from tests.live import asked
from tests.live_poison import Poison
from tests.live_tasks import claim
from tests.lockstep import job as small_job
from tests.poisoned import Poisoned, hit

STEPS = 12
EACH = {"every_steps": 1, "keep": 1000}
_HERE = Path(__file__)


class DiesOnce(Poison):
    """The first process that computes the bad sample ends, without a word."""

    def _now(self) -> bool:
        return claim(str(Path(self.folder, "died")))


def cases(folder: Path) -> Iterator[tuple[str, Sequence[Job]]]:
    """Each history's name, and its starts: all but the first resume."""
    for shares in ([8], [5, 3], [3, 3, 2]):
        yield f"shares {shares}", [_plain(shares)]
        yield f"statistics, shares {shares}", [_plain(shares, task="PairTask")]
    yield "float32, shares [5, 3]", [_plain([5, 3], settings={"double": False})]
    yield "resumed by others", [_plain([5, 3], steps=7), _plain([3, 3, 2])]
    dies = _poisoned(folder, "exit", 2, task=f"{_HERE}:DiesOnce")
    yield "one of two workers dies", [dies]
    dies = _poisoned(folder / "three", "exit", 3, task=f"{_HERE}:DiesOnce")
    yield "one of three workers dies", [dies]
    yield "a sample is skipped", [_poisoned(folder, "loss", 2, errors={"on_error": "skip"})]
    yield "a step is left out", [_poisoned(folder, "nan", 2, errors={"on_nan": "rollback"})]


def _plain(shares: list[int], task: str = "Steady", **changes: Any) -> Job:
    return asked(task, shares, **({"steps": STEPS, "checkpoint": EACH} | changes))


def _poisoned(folder: Path, how: str, workers: int, **changes: Any) -> Job:
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "task": f"{_HERE.with_name('live_poison.py')}:Poison",
        "elastic": {"min_workers": 1, "max_workers": workers, "shares": "equal"},
        "steps": STEPS,
        "checkpoint": EACH,
        "settings": {"how": how, "bad": [_late(small_job())], "folder": str(folder)},
    }
    return small_job(**(values | changes))


def _late(job: Job) -> int:
    """A sample that nobody tries out before the first step: it comes in the fourth at first."""
    task = Poisoned()
    cut = Steps(samples=task.samples, global_batch=job.global_batch, micro_batch=job.micro_batch)
    at = Position()
    for step in range(4):
        span = cut.span(step, at)
        at = cut.after(span)
    last = span.micro_batches[-1]
    return next(i for i in range(task.samples) if hit(job, Poisoned(bad=[i]), last))


def record() -> dict[str, dict[str, str]]:
    """The digest of all tensors after each step, by case."""
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for number, (name, starts) in enumerate(cases(Path(root))):
            run_dir = Path(root, f"run-{number}")
            for at, job in enumerate(starts):
                raycloud.train(job, run_dir=run_dir, resume=at > 0)
            store = open_store(str(run_dir / "checkpoints"))
            found[name] = {
                str(step): digest(load_tensors(store, load(store, step)).items())
                for step in steps(store)
            }
            _say(f"{name}: {len(found[name])} steps, {found[name][str(STEPS)]}")
    return found


def differences(before: Any, after: Any) -> list[str]:
    """What is not the same in two recordings, in words."""
    told = [f"{name}: only in one" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        both = one.keys() & other.keys()  # the checkpoint of a step that breaks may be dropped
        apart = [int(step) for step in both if one[step] != other[step]]
        told += [f"{name}: from step {min(apart)} on"] if apart else []
    return sorted(told)


def main(words: Sequence[str]) -> int:
    """See the module."""
    match words:
        case ["record", file]:
            ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
            Path(file).write_text(json.dumps(record(), indent=1))
            return 0
        case ["compare", before, after]:
            told = differences(*(json.loads(Path(file).read_text()) for file in (before, after)))
            _say("\n".join(told) or "bitwise the same")
            return bool(told)
        case _:
            _say(__doc__)
            return 2


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
