"""Two ways through the house, recorded: a job to its first step, a gradient to its commit.

    python -m tests.ways write      (docs/ways.md follows from what is recorded)

At each milestone of a way the stack is looked at, and its frames in `raycloud/` are noted. The way
is the files that these stacks name, in the order in which they come up: each is a hop. A file that
stands twice in one stack, with others between, is entered twice: it calls down and is called back.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from torch import nn, optim

from raycloud.order import Position
from tests.live_tasks import Steady
from tests.lockstep import NetTask, job
from tests.poisoned import Looped
from tests.sockets import gloo_members, together

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "raycloud"
PREFIX = f"{PACKAGE}/"
PAGE = ROOT / "docs" / "ways.md"
MOST_JOB, MOST_GRADIENT = 25, 12

Stack = tuple[tuple[str, str], ...]  # (file below raycloud/, function), outermost first


@dataclass(frozen=True)
class Milestone:
    """A call at which the stack is looked at: the first one of a function."""

    what: str
    file: str
    function: str


# What the command's process comes to, and then a worker's.
JOB = (
    Milestone("the job is checked", "spec/load.py", "load_job"),
    Milestone("Ray is there", "on_ray/attach.py", "attached"),
    Milestone("the machines are counted", "on_ray/attach.py", "inventory"),
    Milestone("a worker is started", "on_ray/pool.py", "ActorPool.start"),
    Milestone("workers are told to meet", "on_ray/fleet.py", "Fleet.form"),
)
WORKER = ("a worker builds the model", "the first step is committed")
GRADIENT = (
    Milestone("a gradient is complete", "sync/gradients.py", "GradientExchange._finished"),
    Milestone("its bucket leaves", "net/gloo.py", "GlooTransport.all_reduce"),
    Milestone("the sum is there", "net/gloo.py", "GlooWork.wait"),
    Milestone("parameters are updated", "step/state.py", "Update.apply"),
)


def inside(path: str) -> str:
    """A file's name below raycloud/; empty: it is elsewhere."""
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else ""


def stack_of(frame: FrameType | None) -> Stack:
    """Files and functions of `raycloud/`, outermost first."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        if file := inside(frame.f_code.co_filename):
            found.append((file, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(found))


class Recorder:
    """A profile function that notes the stack at the first call of each milestone.

    Args:
        milestones: Which calls.
        begin: Nothing is noted before this function is called; None: from the start.
    """

    def __init__(self, milestones: Sequence[Milestone], begin: str | None = None) -> None:
        self._due = {(one.file, one.function): one.what for one in milestones}
        self._begin = begin
        self.stacks: dict[str, Stack] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (file := inside(frame.f_code.co_filename)):
            return
        if self._begin is not None:
            if frame.f_code.co_qualname != self._begin:
                return
            self._begin = None
        what = self._due.pop((file, frame.f_code.co_qualname), None)
        if what is not None:
            self.stacks[what] = stack_of(frame)
            if not self._due:
                sys.setprofile(None)  # what comes behind the last one goes at full speed


class Told(Steady):
    """Writes down how it was come to: where the model is built, and where a step is committed."""

    def __init__(self, *, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = Path(folder)

    def _tell(self, what: str) -> None:
        path = self.folder / f"{WORKER.index(what)}.json"
        if not path.exists():
            frames = traceback.walk_stack(sys._getframe(1))
            path.write_text(json.dumps(stack_of(next(frame for frame, _ in frames))))

    def model(self) -> nn.Module:
        self._tell(WORKER[0])
        return super().model()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        made = super().optimizer(model)
        made.register_step_post_hook(lambda *_: self._tell(WORKER[1]))
        return made


def way_of_a_job() -> dict[str, Stack]:
    """Milestones and stacks of `raycloud train` with one worker, on a Ray of its own."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        asked = {
            "format": 1,
            "name": "way",
            "task": f"{__file__}:Told",
            "settings": {"folder": root},
            "steps": 1,
            "global_batch": 16,
            "micro_batch": 2,
            "elastic": {"min_workers": 1, "max_workers": 1},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(asked))
        command = [sys.executable, "-m", "tests.ways", "command", root]
        subprocess.run(command, cwd=ROOT, check=True, timeout=170, stdout=subprocess.DEVNULL)
        told = json.loads((folder / "command.json").read_text())
        for number, what in enumerate(WORKER):
            told[what] = json.loads((folder / f"{number}.json").read_text())
    order = [*(one.what for one in JOB[:-1]), WORKER[0], JOB[-1].what, WORKER[1]]
    return {what: tuple((file, name) for file, name in told[what]) for what in order}


def command(folder: Path) -> None:
    """The command, recorded: in a process of its own."""
    from raycloud.cli import main

    recorder = Recorder(JOB)
    sys.argv = ["raycloud", "train", str(folder / "job.yaml"), "--run-dir", str(folder / "run")]
    sys.setprofile(recorder)
    try:
        main()
    finally:
        sys.setprofile(None)
        (folder / "command.json").write_text(json.dumps(recorder.stacks))


def way_of_a_gradient() -> dict[str, Stack]:
    """Milestones and stacks of a step of two members that exchange by gloo."""
    recorder = Recorder(GRADIENT, begin="backward")

    def recorded(run: Callable[..., Any], *arguments: Any) -> Any:
        sys.setprofile(recorder)
        try:
            return run(*arguments)
        finally:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as root:
        made = [Looped(Path(root), job(steps=2), NetTask(), 2) for _ in range(2)]
        for one in made:
            first = one.parts.steps.span(0, Position()).micro_batches[0]
            one.replica.try_out(one.parts.collate.one(first))
        with gloo_members(2) as gradients, gloo_members(2) as lanes:
            one, other = zip(made, gradients, lanes, strict=True)
            calls = [
                partial(recorded, one[0].run, one[1], one[2], (4, 4)),
                partial(other[0].run, other[1], other[2], (4, 4)),
            ]
            assert all(together(calls))
    return {one.what: recorder.stacks[one.what] for one in GRADIENT}


def hops(way: dict[str, Stack]) -> list[tuple[str, str, str]]:
    """Each file once, where it comes up first: file, function, and the milestone it leads to."""
    found: dict[str, tuple[str, str, str]] = {}
    for what, stack in way.items():
        for file, function in stack:
            found.setdefault(file, (file, function, what))
    return list(found.values())


def entered_twice(stack: Stack) -> list[str]:
    """Files of a stack that were left for others and called back."""
    files = [file for at, (file, _) in enumerate(stack) if not at or stack[at - 1][0] != file]
    return sorted({file for file in files if files.count(file) > 1})


def described(file: str, function: str) -> str:
    """The first sentence of a function's docstring, or of its class or module."""
    tree: Any = ast.parse((PACKAGE / file).read_text())
    said = ast.get_docstring(tree) or ""
    for name in function.replace("<locals>.", "").split("."):
        tree = next((n for n in ast.walk(tree) if getattr(n, "name", None) == name), None)
        if tree is None:
            break
        said = ast.get_docstring(tree) or said
    return " ".join(said.split("\n\n")[0].split())


def page(job_way: dict[str, Stack], gradient_way: dict[str, Stack]) -> str:
    """The text of docs/ways.md."""
    lines = [
        "# Two ways through the house",
        "",
        "Recorded from a real start and a real step by `python -m tests.ways write`; a test holds",
        "that this page is what they do. A hop is a file on the stack at a milestone, where it",
        "comes up first.",
    ]
    for title, way in (
        ("A job, from the command to its first committed step", job_way),
        ("A gradient, from backward to commit", gradient_way),
    ):
        lines += ["", f"## {title}"]
        before = ""
        for number, (file, function, what) in enumerate(hops(way), 1):
            if what != before:
                lines += ["", f"Until {what}:", ""]
            before = what
            lines.append(f"{number}. `{file}`, `{function}`: {described(file, function)}")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    """See the module."""
    match words:
        case ["write"]:
            PAGE.write_text(page(way_of_a_job(), way_of_a_gradient()))
            return 0
        case ["command", folder]:
            command(Path(folder))
            return 0
        case _:
            sys.stdout.write(f"{__doc__}\n")
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
