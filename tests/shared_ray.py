"""The Ray that modules of tests share, one after the other, and what each has left there."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.live import ended, processes_below

if TYPE_CHECKING:
    from raycloud.on_ray.seats import SeatsHandle

# Ray gives its raylet one second to end; where that is too short, on a busy machine, its agents
# want to tell a head that is gone, and give up after a minute.
END_S = 90.0
TIDY_S, RAYS_S = 30.0, 1.0  # for what a run gives back behind its end; for what Ray does
PROCESS = re.compile(r"ray::(\w+)")
RAYS_OWN = {"IDLE", "DashboardAgent", "RuntimeEnvAgent"}
OF_SEATS = {"SeatsActor", "MemberActor"}
MADE_HERE = {
    "CollatorActor",
    "MemberActor",
    "NodeBlocksActor",
    "PipelineActor",
    "PoolActor",
    "SeatsActor",
    "ServerActor",
    "TrialRun",
}


class SharedRay:
    """An embedded Ray below a folder of its own; the first who needs it starts it.

    The path is short, since Ray puts Unix sockets below it and their paths end at 107 characters.

    Args:
        cpus: How many it has.
    """

    def __init__(self, cpus: int) -> None:
        self.cpus, self.address = cpus, ""
        self.folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
        self.modules: list[str] = []
        self._seats: SeatsHandle | None = None

    def start(self) -> str:
        """Start it, unless it is there; its address. `RAY_TMPDIR` is its folder already."""
        import ray

        from raycloud.on_ray.attach import _EMBEDDED, _QUIET, _few_services

        if self.address:
            return self.address
        with pytest.MonkeyPatch.context() as patch, _few_services():
            for name, value in (_QUIET | _EMBEDDED).items():
                patch.setenv(name, value)
            ray.init(
                num_cpus=self.cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        self.address = str(ray.get_runtime_context().gcs_address)
        return self.address

    def seats(self) -> SeatsHandle:
        """Seats for runs of this process, whose workers have loaded torch by the second run."""
        from raycloud.on_ray.seats import SeatsHandle
        from raycloud.spec.sections import RoleResources

        if self._seats is None:
            self._seats = SeatsHandle.start(RoleResources())
        return self._seats

    def close_seats(self) -> None:
        """Give them back, so that all CPUs are free, and end the pipelines that runs shared."""
        if self._seats is not None:
            self._seats.close()
            self._seats = None

    def left(self) -> tuple[list[str], list[str]]:
        """What a module has left, of raycloud's and of Ray's own, once all had time to end."""
        began_s, pause = time.monotonic(), threading.Event()
        while True:
            ours, others = self._left()
            took_s = time.monotonic() - began_s
            done = took_s > RAYS_S if others else True
            if (done and not ours) or took_s > TIDY_S:
                return ours, others
            pause.wait(0.1)

    def _left(self) -> tuple[list[str], list[str]]:
        import ray
        from ray.util import placement_group_table

        if not self.address:
            return [], []
        seats = "" if self._seats is None else self._seats.name
        kept = RAYS_OWN | OF_SEATS if seats else RAYS_OWN
        ours = [
            f"a placement group {group['name']}"
            for group in placement_group_table().values()
            if group["state"] != "REMOVED" and not (seats and group["name"].startswith(seats))
        ]
        others: list[str] = []
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"] != seats:
                among = ours if actor["name"].startswith("raycloud") else others
                among.append(f"an actor {actor['name']}")
        for line in processes_below(self.folder).values():
            kind = PROCESS.match(line)
            if kind is not None and kind[1] not in kept:
                (ours if kind[1] in MADE_HERE else others).append(line)
        return ours, others

    def end(self) -> None:
        """End it; fails if a process that was started below its folder outlives it."""
        self.close_seats()
        shut_down()
        self.address = ""
        left = ended_below(self.folder)
        assert not left, f"{self.modules}: still running after Ray was shut down: {left}"


def ended_below(folder: Path) -> dict[int, str]:
    """Wait for all processes of a Ray's folder to end, and remove it; who had to be killed."""
    left = ended(processes_below(folder), END_S)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def shut_down() -> None:
    """End the Ray that this process started or joined; one that it joined keeps running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
