"""The environments that torchft and Hivemind run in, made when they are first needed.

Each is a virtual environment that holds the peer and the few packages that it needs besides; all
else, torch before all, it sees in the environment that the benchmark runs in, so that every
contestant computes with the same torch. Installed without requirements: theirs name no versions
that would differ, and would install a second torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import ROOT

PLACE = ROOT / ".peers"
_LIMIT_S = 300.0


class NotInstalledError(Exception):
    """A peer could not be installed; says why."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer with an environment of its own.

    Attributes:
        name: Of the package and the module.
        version: Of the package.
        needs: What it needs besides and the outer environment has not, pinned.
        takes: What it takes from the outer environment, for the record.
    """

    name: str
    version: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("torch",)

    @property
    def requirements(self) -> tuple[str, ...]:
        """All that is installed."""
        return (f"{self.name}=={self.version}", *self.needs)


TORCHFT = Peer(name="torchft", version="0.2.0", takes=("torch", "opentelemetry-sdk"))
HIVEMIND = Peer(
    name="hivemind",
    version="1.1.12",
    needs=(
        "base58==2.1.1",
        "blake3==1.0.11",
        "configargparse==1.9.0",
        "grpcio-tools==1.85.1",
        "mmh3==5.3.1",
        "morphys==1.0",
        "netaddr==1.3.0",
        "prefetch_generator==1.0.3",
        "py-cid==0.5.0",
        "py-multibase==2.0.0",
        "py-multicodec==1.0.0",
        "py-multihash==3.0.0",
        "python-baseconv==1.2.2",
        "uvloop==0.23.0",
        "varint==1.0.2",
    ),
    takes=("torch", "protobuf", "grpcio"),
)


def versions(peer: Peer) -> Mapping[str, str]:
    """What is measured when the peer is."""
    return {peer.name: peer.version, **{name: version(name) for name in peer.takes}}


def place_of(peer: Peer, directory: Path = PLACE) -> Path:
    """Where a peer's environment is: another one for other versions, and for another Python."""
    known = (*peer.requirements, sys.prefix, sys.version, *versions(peer).values())
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
    return directory / f"{peer.name}-{key}"


def packages(peer: Peer, directory: Path = PLACE) -> Path:
    """Where a peer's environment has its packages."""
    place = str(place_of(peer, directory))
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": place, "platbase": place}))


def interpreter(peer: Peer, directory: Path = PLACE) -> Path:
    """The interpreter of a peer's environment, made below `directory` if it is not there yet.

    Raises:
        NotInstalledError: It could not be installed, or cannot be imported.
    """
    place = place_of(peer, directory)
    python = place / "bin" / "python"
    ready = place / "ready"
    if ready.exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=False, symlinks=True)
    (packages(peer, directory) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install"),
            *("--quiet", "--no-deps", "--disable-pip-version-check", *peer.requirements),
        ]
    )
    _run([str(python), "-W", "ignore", "-c", f"import {peer.name}"])
    ready.touch()
    return python


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise NotInstalledError(said[-1])
