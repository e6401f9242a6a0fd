"""An embedded Ray of its own for each module, and nothing left behind."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import ended, processes_below

# Ray gives its raylet one second to end; where that is too short, on a busy machine, its agents
# want to tell a head that is gone, and give up after a minute.
END_S = 90.0


@pytest.fixture(scope="session", autouse=True)
def ray_token() -> Iterator[None]:
    """A token of these tests' own, not the one in one's home; Ray reads it once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module", autouse=True)
def ray_tmpdir(ray_token: None) -> Iterator[Path]:
    """The folder in which this module's Ray lives; afterwards Ray is down and the folder is gone.

    The path is short, since Ray puts Unix sockets below it and their paths end at 107 characters.
    Fails the module if a process that was started below it outlives Ray.
    """
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.delenv("RAY_ADDRESS", raising=False)  # never somebody else's cluster
        try:
            yield folder
        finally:
            _shut_down()
            left = ended(processes_below(folder), END_S)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"still running after Ray was shut down: {left}"


@pytest.fixture(scope="module")
def cluster(ray_tmpdir: Path, request: pytest.FixtureRequest) -> str:
    """A Ray for all tests of a module that ask for it, with the module's `CPUS`; its address.

    `raycloud.train` uses the Ray that this process is attached to, so it starts none of its own.
    """
    import ray

    from raycloud.on_ray.attach import _EMBEDDED, _QUIET

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=getattr(request.module, "CPUS", 2),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture(scope="module")
def warm(cluster: str) -> Iterator[None]:
    """Runs of this process share the cluster's seats, whose workers have loaded torch already."""
    from raycloud.on_ray import run
    from raycloud.on_ray.seats import SeatsHandle
    from raycloud.spec.sections import RoleResources

    seats = SeatsHandle.start(RoleResources())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.train.__kwdefaults__, "seats", seats)
        yield
    seats.close()


def _shut_down() -> None:
    """End the Ray that this process started or joined; one that it joined keeps running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
