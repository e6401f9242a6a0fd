"""Who delivers the images, each started as one command with a process tree of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contestants import CONTESTANTS as TRAINERS
from benchmarks.contestants import Attempt, Contestant
from benchmarks.feeding.environment import NotInstalledError, streaming_python
from benchmarks.processes import run

if TYPE_CHECKING:
    from benchmarks.feeding.images import ImageSet

BATCH = 128
LIMIT_S = 600.0
RAY_VARIABLES = {**TRAINERS["ray-train"].variables, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
"""What quiets a Ray, and what a user who cares for speed sets too."""


@dataclass(frozen=True, kw_only=True)
class Feeder:
    """One way to deliver the images.

    Attributes:
        module: Its script; all take the same arguments.
        decoder: `own`: as its documentation decodes JPEGs. `same`: the same with raycloud's
            decoder. `batched`: with raycloud's, a batch at once, in code written for this.
        variables: Environment variables of its own.
        apart: Whether it runs in an environment of its own.
    """

    module: str
    decoder: str
    variables: Mapping[str, str]
    apart: bool = False


OURS = "raycloud"
OWN, SAME, BATCHED = "own", "same", "batched"


def _feeders(
    module: str, decoders: Sequence[str], variables: Mapping[str, str], *, apart: bool = False
) -> list[Feeder]:
    return [
        Feeder(module=module, decoder=decoder, variables=variables, apart=apart)
        for decoder in decoders
    ]


FEEDERS: Mapping[str, Feeder] = {
    OURS: Feeder(module="benchmarks.feeding.raycloud_epochs", decoder=SAME, variables={}),
    **{
        f"{name}, {feeder.decoder} decoder": feeder
        for name, group in {
            "torch loader": _feeders("benchmarks.peers.torch_loader", (OWN, SAME, BATCHED), {}),
            "ray.data": _feeders("benchmarks.peers.ray_data", (OWN, SAME), RAY_VARIABLES),
            "ray train": _feeders("benchmarks.peers.ray_train_ingest", (OWN, SAME), RAY_VARIABLES),
            "streaming": _feeders("benchmarks.peers.streaming", (OWN, SAME), {}, apart=True),
        }.items()
        for feeder in group
    },
}


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A feeder that cannot run here, and why."""

    name: str
    why: str


def interpreters(environments: Path) -> tuple[dict[str, Path], list[Missing]]:
    """The Python of each feeder; those that could not be installed are missing."""
    found: dict[str, Path] = {}
    missing = []
    for name, feeder in FEEDERS.items():
        try:
            found[name] = streaming_python(environments) if feeder.apart else Path(sys.executable)
        except NotInstalledError as error:
            missing.append(Missing(name=name, why=f"not installed: {error}"))
    return found, missing


def deliver(name: str, python: Path, images: ImageSet, *, warm: int) -> dict[str, Any]:
    """Have one feeder deliver all images: what its consumer measured.

    Raises:
        CommandFailedError: It failed.
        ValueError: It delivered something else than the images.
    """
    feeder = FEEDERS[name]
    with attempt() as place:
        out = place.directory / "out.json"
        command = [
            *(str(python), "-W", "ignore", "-m", feeder.module),
            *("--images", str(images.directory), "--small", str(images.small)),
            *("--decoder", feeder.decoder, "--batch", str(BATCH)),
            *("--warm", str(warm), "--out", str(out)),
        ]
        started(command, place, feeder.variables)
        found: dict[str, Any] = json.loads(out.read_text())
    for epoch in found["epochs"]:
        _check(name, epoch, images)
    return found


def _check(name: str, epoch: Mapping[str, Any], images: ImageSet) -> None:
    expected = vars(images.sums)
    if epoch["sums"] != expected:
        raise ValueError(
            f"{name}: a {epoch['kind']} epoch came to {epoch['sums']}, and the images to {expected}"
        )


@contextmanager
def attempt() -> Iterator[Attempt]:
    """A directory that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as directory:
        yield Attempt(directory=Path(directory), steps=0)


def started(command: list[str], place: Attempt, variables: Mapping[str, str]) -> str:
    """Run a command to its end, with everything it starts; what it said.

    Raises:
        CommandFailedError: It failed.
    """
    log = place.directory / "log"
    contestant = Contestant(command=lambda _: command, variables=variables)
    run(command, environment=contestant.environment(place), log=log, limit_s=LIMIT_S)
    return log.read_text(errors="replace")
