"""The doctor as a command, against clusters in which the faults are really there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import RAYCLOUD, Command, command, ran, wait_for

pytestmark = pytest.mark.timeout(600)

RAY = Path(sys.executable).with_name("ray")
HOST = "127.0.0.1"
START_S = 150.0
# Of the machine that the tests run on; what is wrong there is not what is planted here.
MACHINES_OWN = {"temp-full", "shm-small", "memory-full"}
SHIFT = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += 90;
    return failed;
}
"""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def started(folder: Path, *arguments: str, **variables: str) -> Iterator[None]:
    """`ray start --block`, until it is told to end.

    Args:
        folder: For its output.
        arguments: Of `ray start`.
        variables: Added to its environment.
    """
    options = ("--block", "--node-ip-address", HOST, "--num-cpus", "1", "--disable-usage-stats")
    start = (RAY, "start", *options)
    with contextlib.ExitStack() as stack:
        for attempt in range(3):
            ray = stack.enter_context(
                command(folder / str(attempt), *start, *arguments, **variables)
            )

            def up(ray: Command = ray) -> bool:
                return ray.ended() or "Ray runtime started" in ray.out

            wait_for("ray start", up, seconds=START_S)
            if not ray.ended():
                break
            # Ray gives its raylet 30 s to come up, whatever else the machine does.
            assert attempt < 2, ray.err
            assert "timed out during startup" in ray.err, ray.out + ray.err
        try:
            yield
        finally:
            ray.process.send_signal(signal.SIGTERM)
            ray.process.wait(START_S)


def head(port: int, store_bytes: int) -> tuple[str, ...]:
    client = f"--ray-client-server-port={free_port()}"
    store = f"--object-store-memory={store_bytes}"
    few = ("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor")
    return ("--head", f"--port={port}", client, store, *few)


def asked(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """`raycloud doctor --json`: its exit code, and what it found, by name."""
    with command(folder, RAYCLOUD, "doctor", "--json", *arguments, **variables) as one:
        code = one.code(START_S)
    assert one.out, one.err
    assert one.err == ""
    record = json.loads(one.out)
    assert record["exit_code"] == code
    found: dict[str, list[Any]] = {}
    for finding in record["findings"]:
        found.setdefault(finding["name"], []).append(finding)
    return code, found


def bad(found: dict[str, list[Any]]) -> set[str]:
    """Names of what is not well, but for the machine's own."""
    levels = {name: {one["level"] for one in some} for name, some in found.items()}
    return {name for name, some in levels.items() if some & {"change", "unwell"}} - MACHINES_OWN


def shifted_clock(folder: Path) -> dict[str, str]:
    """What moves the clock of processes that are started with it; nothing without a compiler."""
    if not shutil.which("cc"):
        return {}
    source, library = folder / "shift.c", folder / "shift.so"
    source.write_text(SHIFT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


def another_torch(folder: Path) -> str:
    """A path on which another version of torch is installed, as far as its metadata say."""
    installed = folder / "torch-2.5.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.0\n")
    return str(folder)


@pytest.mark.full(only="the doctor finds what was planted in a cluster")
def test_planted_faults_are_found(tmp_path: Path, ray_tmpdir: Path) -> None:
    port, address = (number := free_port()), f"{HOST}:{number}"
    open_to_all = {"RAY_AUTH_MODE": "disabled"}
    clock = shifted_clock(tmp_path)
    other = {"PYTHONPATH": another_torch(tmp_path / "installed")} | clock
    first = started(tmp_path / "head", *head(port, 80_000_000), **open_to_all)
    worker = (f"--address={address}", "--num-gpus=1", "--object-store-memory=300000000")
    second = started(tmp_path / "node", *worker, **open_to_all, **other)
    with first, second:
        code, found = asked(tmp_path / "doctor", "--address", address, "--links", **open_to_all)
    assert code == 3
    expected = {
        "auth-off",  # RAY_AUTH_MODE here
        "cluster-open",  # and there
        "version-differs",  # torch, on the second node
        "gpu-absent",  # --num-gpus of a node without one
    } | ({"clock-apart"} if clock else set())
    assert bad(found) == expected
    assert found["version-differs"][0]["value"].startswith("torch 2.5.0;")
    if clock:
        (apart,) = found["clock-apart"]
        assert float(apart["value"].split()[0]) == pytest.approx(90, abs=2)
        assert apart["where"] == found["gpu-absent"][0]["where"]  # the second node
    assert len(found["links"]) == 2  # each to the other, and measured
    assert all("MB/s" in one["value"] for one in found["links"])


@pytest.mark.full(only="the doctor finds nothing in a sound cluster")
def test_a_sound_cluster_and_ways_to_miss_it(tmp_path: Path, ray_tmpdir: Path) -> None:
    port, address = (number := free_port()), f"{HOST}:{number}"
    home = tmp_path / "home"
    home.mkdir()
    mine = {"RAY_AUTH_MODE": "token", "HOME": str(home)}
    with started(
        tmp_path / "head", *head(port, 300_000_000), RAY_AUTH_MODE="token", HOME=str(home)
    ):
        code, found = asked(tmp_path / "well", "--address", address, **mine)
        assert bad(found) == set()
        own = {one["level"] for name in MACHINES_OWN & found.keys() for one in found[name]}
        assert code == (3 if "unwell" in own else 2 if "change" in own else 0)
        assert [one["value"] for one in found["auth"]] == ["token", "token"]
        assert found["nodes"][0]["value"] == "1 of 1 nodes answer"

        wrong = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        code, found = asked(tmp_path / "wrong", "--address", address, **mine | wrong)
        assert bad(found) == {"cluster-refused"}
        assert code in {2, 3}
        assert not list(home.rglob("auth_token"))  # looking makes no token
    code, found = asked(tmp_path / "gone", "--address", address, **mine)
    assert (code, bad(found)) == (3, {"cluster-away"})


@pytest.mark.full
def test_small_shared_memory_and_a_full_disk(tmp_path: Path) -> None:
    alone = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or ran(tmp_path / "try", *alone, "true")[0] != 0:
        pytest.skip("this machine lets no user mount a file system of their own")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs {disk} && "
        f"exec {RAYCLOUD} doctor --json"
    )
    code, one = ran(tmp_path, *alone, "sh", "-c", script, RAY_TMPDIR=str(disk), RAY_ADDRESS="")
    assert code == 3, one.err
    found = {finding["name"]: finding for finding in json.loads(one.out)["findings"]}
    assert found["shm-small"]["value"] == "/dev/shm: 67 MB"
    assert found["temp-full"]["value"].startswith(str(disk))
    assert os.statvfs("/dev/shm").f_frsize  # ours is as it was
