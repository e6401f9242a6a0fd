"""A task for runs on a real Ray that breaks on some samples, in the midst of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.live_tasks import Steady
from tests.poisoned import Poisoned


class Poison(Poisoned, Steady):
    """As it is told: see `Poisoned`; and `exit`, which ends the process without a word.

    What is tried out before the first step is the beginning of the sequence: choose others.
    """

    def __init__(self, *, folder: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def _break(self, model: nn.Module, batch: Any) -> Tensor:
        if self.how == "exit":
            Path(self.folder, str(os.getpid())).touch()
            os._exit(7)
        return super()._break(model, batch)
