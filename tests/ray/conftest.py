"""Modules that ask for a Ray share one; others have a folder of their own; nothing is left."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloud.control import ControlSettings
from tests.shared_ray import SharedRay, ended_below, shut_down

CPUS = 2  # of a shared Ray, where a module says nothing of its own
MANY = 99  # more than any has
OTHERS_S = 60.0
MOST_LINES, MOST_CHARS = 80, 400  # of a log that is shown with a failure

# Those that take longest, which come first: no process is to have much to do when the other ends.
LONG = (
    "test_failover",
    "test_canary",
    "test_submit",  # with those that have a head, too
    "test_standing",
    "test_metrics",
    "test_quick",
    "test_stop",
    "test_cluster_examples",
    "test_leaving",
    "test_pipeline_nodes",
    "test_hung_path",
    "test_installed",
    "test_chaos",
    "test_doctor",
    "test_cli_real",
    "test_autoscaler",
    "test_ways",
    "test_cluster",
    "test_plan_nodes",
    "test_tree",
    "test_docs_blocks",
    "test_docs_ports",
    "test_sweep",
    "test_jobs",
    "test_pipeline_faults",
    "test_pipeline",
    "test_try",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where a test failed, tell its runs' logs, but for steps: it may fail once in weeks."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and folder is not None:
        for log in sorted(folder.rglob("events.jsonl")):
            lines = log.read_text(errors="replace").splitlines()
            told = [line[:MOST_CHARS] for line in lines if '"event":"StepsCommitted"' not in line]
            report.sections.append((f"what {log} tells", "\n".join(told[-MOST_LINES:])))
    return report


@pytest.hookimpl(trylast=True)  # by then only those are left that are going to be run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with a Ray of their own come first; then those that share one, by its size."""
    below = Path(__file__).parents[1]
    mine = [item for item in items if {below / "ray", below / "testbed"} & {*item.path.parents}]
    paths = list(dict.fromkeys(item.path for item in mine))
    using = {path: [item for item in mine if item.path == path] for path in paths}

    def place(path: Path) -> tuple[int, int, int, int]:
        wanted, warm = _wishes(using[path])
        cpus = getattr(using[path][0].module, "CPUS", CPUS) if wanted else MANY  # type: ignore[attr-defined]
        long = LONG.index(path.stem) if path.stem in LONG else len(LONG)
        return -cpus, warm, long, paths.index(path)

    ordered = [item for path in sorted(paths, key=place) for item in using[path]]
    rest = [item for item in items if item.path not in using]
    items[:] = rest + ordered


def _wishes(items: list[pytest.Item]) -> tuple[bool, bool]:
    """Whether some of these tests ask for a shared Ray, and whether all that do run warm."""
    names = [item.fixturenames for item in items]  # type: ignore[attr-defined]
    asking = [one for one in names if "cluster" in one]
    return bool(asking), all("warm" in one for one in asking)


@pytest.fixture(scope="session", autouse=True)
def ray_token() -> Iterator[None]:
    """A token of these tests' own, not the one in one's home; Ray reads it once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(autouse=True)
def all_begin() -> Iterator[None]:
    """Workers that a job asks for begin together, on a busy machine too, unless a test says else.

    Who is ready would begin after 3 s: then one alone may be killed, whose state nobody has.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ControlSettings.__init__.__kwdefaults__, "others_s", OTHERS_S)
        yield


class Kept:
    """The Ray that the next module may have, too."""

    ray: SharedRay | None = None

    def of(self, cpus: int) -> SharedRay:
        """The one with so many CPUS; another one is ended."""
        if self.ray is None or self.ray.cpus != cpus:
            self.end()
            self.ray = SharedRay(cpus)
        return self.ray

    def end(self) -> None:
        """End it, if there is one."""
        ray, self.ray = self.ray, None
        if ray is not None:
            ray.end()


@pytest.fixture(scope="session")
def kept(ray_token: None) -> Iterator[Kept]:
    """Ended with the session."""
    one = Kept()
    yield one
    one.end()


@pytest.fixture(scope="module", autouse=True)
def ray_tmpdir(kept: Kept, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder in which this module's Ray lives, its own or a shared one.

    Its own is down afterwards, and the folder is gone: fails the module if a process that was
    started below it outlives Ray. In a shared one nothing of its runs may be left; the next module
    has another one where a test failed, or something of Ray's own stays.
    """
    module = request.path
    items = [item for item in request.session.items if item.path == module]
    wanted, all_warm = _wishes(items)
    failed = request.session.testsfailed
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)  # never somebody else's cluster
        if not wanted:
            kept.end()
            yield from _own(patch)
            return
        shared = kept.of(getattr(request.module, "CPUS", CPUS))
        shared.modules.append(module.stem)
        if not all_warm:
            shared.close_seats()
        patch.setenv("RAY_TMPDIR", str(shared.folder))
        yield shared.folder
        ours, others = shared.left()
        if ours or others or request.session.testsfailed > failed:
            kept.end()
        assert not ours, f"still there after all runs: {ours}"


def _own(patch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))  # short: see SharedRay
    patch.setenv("RAY_TMPDIR", str(folder))
    try:
        yield folder
    finally:
        shut_down()
        left = ended_below(folder)
    assert not left, f"still running after Ray was shut down: {left}"


@pytest.fixture(scope="session")
def own_tmpdir(ray_token: None) -> Iterator[Path]:
    """A folder for a Ray that a command starts beside the module's.

    Agents of one whose command was killed may take a minute to end: the session need not wait.
    """
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    try:
        yield folder
    finally:
        left = ended_below(folder)
    assert not left, f"still running after its command: {left}"


@pytest.fixture(scope="module")
def cluster(ray_tmpdir: Path, kept: Kept) -> str:
    """A Ray with the module's `CPUS` for all tests that ask for it; its address.

    `raycloud.train` uses the Ray that this process is attached to, so it starts none of its own.
    """
    assert kept.ray is not None
    return kept.ray.start()


@pytest.fixture(scope="module")
def warm(cluster: str, kept: Kept) -> Iterator[None]:
    """Runs of this process share the cluster's seats, whose workers have loaded torch already."""
    from raycloud.on_ray import run

    assert kept.ray is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.train.__kwdefaults__, "seats", kept.ray.seats())
        yield
