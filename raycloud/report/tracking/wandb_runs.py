"""Weights & Biases: offline into the run directory, or online."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.report.tracking.seam import About, Numbers
    from raycloud.spec.tracking import WandbSection

_WAIT_S = 20.0


class WandbTracker:
    """A run in Weights & Biases.

    Its own view of the machine, the command line, the code and the terminal is switched off: they
    would show what this project takes out of everything it writes.

    Args:
        asked: What the job says of it.
        project: The project's name.
        folder: The run directory; what it writes goes to `wandb/` there.
    """

    def __init__(self, asked: WandbSection, project: str, folder: Path) -> None:
        """Nothing is begun yet."""
        self._asked, self._project, self._folder = asked, project, folder
        self._run: Any = None
        self._told = -1.0  # the moment of the last numbers taken in

    def begin(self, about: About) -> str:
        """Begin a run with the job's fields as its configuration, or go on with it."""
        wandb: Any = importlib.import_module("wandb")  # an extra, and it takes a second
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=_WAIT_S,
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._asked.entity,
            mode="online" if self._asked.mode == "online" else "offline",
            name=about.run,
            id=about.known or None,
            resume="allow" if about.known else None,
            dir=str(self._folder),
            config={**about.asked, "raycloud": about.version},
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def add(self, numbers: Sequence[Numbers]) -> None:
        """Steps are a measure of their own, so that those taken back by a resume may come again."""
        for one in numbers:
            if one.t > self._told:
                self._run.log({**one.values, "step": one.step, "_timestamp": one.t})
                self._told = one.t

    def end(self, status: str) -> None:
        """Say how it ended; W&B's own process may write the last of it a moment later."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)
