"""raycloud as it is set by default, with equal shares, and with updates in fewer bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from benchmarks.racing.contestant import Attempt, environment
from benchmarks.workload import CLIP_NORM, SEED

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed

_NEVER_STEPS = 1_000_000  # the race ends it
_CHECKPOINT_STEPS = 10  # as often as the peers that restart from one
_RESTARTS = 100
_MICRO_BATCH = 1  # sample: those of a share are fused, and any number of workers shares evenly


class Raycloud:
    """`raycloud train` in the head, its workers on the nodes.

    Args:
        name: Under which it races.
        shares: How a step is split.
        sync: How updates travel.
        servers: How many servers there are.
    """

    on_ray = True

    def __init__(
        self,
        name: str,
        *,
        shares: Literal["auto", "equal"] = "auto",
        sync: Mapping[str, Any] | None = None,
        servers: int = 0,
    ) -> None:
        self.name, self._servers = name, servers
        self._shares, self._sync = shares, dict(sync or {})

    def prepare(self) -> Mapping[str, str]:
        """It is installed with the benchmark."""
        return {name: version(name) for name in ("raycloud", "ray", "torch")}

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start the driver."""
        path = attempt.directory / "job.yaml"
        path.write_text(yaml.safe_dump(self.job(attempt), sort_keys=False))
        program = str(Path(sys.executable).with_name("raycloud"))
        run_directory = str(attempt.directory / "run")
        command = [program, "train", str(path), "--run-dir", run_directory, "--plain"]
        command += ["--address", str(attempt.ray_address)]
        if attempt.elastic:
            command += ["--restarts", str(_RESTARTS)]
        log = attempt.logs / "driver.log"
        return [bed.head.start(command, environment=environment(attempt), log=log)]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:  # noqa: ARG002
        """Nothing: the driver sees to it."""
        return []

    def job(self, attempt: Attempt) -> dict[str, Any]:
        """The work as a job file; all that is not named stays as raycloud sets it."""
        return {
            "format": 1,
            "name": "race",
            "task": "benchmarks.racing.raycloud_task:Race",
            "settings": {
                "journals": str(attempt.journals),
                "snapshots": str(attempt.snapshots),
                "global_batch": attempt.global_batch,
                "learning_rate": attempt.learning_rate,
                "small": attempt.small,
            },
            "steps": _NEVER_STEPS,
            "seed": SEED,
            "global_batch": attempt.global_batch,
            "micro_batch": _MICRO_BATCH,
            "clip_norm": CLIP_NORM,
            "elastic": {
                "min_workers": 1 if attempt.elastic else len(attempt.nodes),
                "max_workers": attempt.most_nodes,
                "shares": self._shares,
            },
            "sync": self._sync,
            "servers": self._servers,
            **({"checkpoint": {"every_steps": _CHECKPOINT_STEPS}} if attempt.elastic else {}),
        }
