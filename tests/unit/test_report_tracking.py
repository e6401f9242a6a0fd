"""Trackers: told in a thread of their own, tried again, given up; and the real ones."""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import JobError
from raycloud.events import Noticed
from raycloud.report import tracking
from raycloud.report.tracking import Feed, Numbers, Trackers, fields_of, require
from raycloud.spec import Job
from tests.live import command, wait_for
from tests.tiers import variants


class Told:
    """A tracker that keeps what it is told, and fails as often as it is asked to."""

    def __init__(self, fails: int = 0, gate: threading.Event | None = None) -> None:
        self.fails, self.gate = fails, gate
        self.calls: list[Any] = []

    def begin(self, known: str) -> str:
        self.calls.append(("begin", known))
        return known or "new"

    def add(self, numbers: Sequence[Numbers]) -> None:
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no route to https://me:hunter2@host")
        self.calls.append([one.step for one in numbers])

    def end(self, status: str) -> None:
        self.calls.append(("end", status))


def number(step: int) -> Numbers:
    return Numbers(float(step), step, {"train/loss": 1.0 / step})


def steps_of(told: Told) -> list[int]:
    return [step for call in told.calls if isinstance(call, list) for step in call]


def closed(feed: Feed, status: str = "finished", wait_s: float = 30.0) -> list[Noticed]:
    feed.finish(status)
    feed.join(wait_s)
    return feed.notices()


def test_numbers_are_told_in_order_and_the_end_last() -> None:
    told = Told()
    feed = Feed("t", told)
    for step in range(1, 6):
        feed.add(number(step))
    assert closed(feed, "stopped") == []
    assert told.calls[0] == ("begin", "")
    assert told.calls[-1] == ("end", "stopped")
    assert steps_of(told) == [1, 2, 3, 4, 5]
    assert feed.called == "new"


def test_a_tracker_that_is_told_nothing_is_never_begun() -> None:
    told = Told()
    assert closed(Feed("t", told)) == []
    assert told.calls == []


def test_what_failed_is_told_again() -> None:
    told = Told(fails=2)
    feed = Feed("t", told)
    feed.add(number(1))
    notices = closed(feed)
    assert steps_of(told) == [1]
    (notice,) = notices
    assert notice.what == "tracking: t failed, and is tried again"
    assert notice.detail["why"] == "ConnectionError: no route to https://[redacted]@host"


def test_a_tracker_that_keeps_failing_is_given_up() -> None:
    told = Told(fails=99)
    feed = Feed("t", told)
    feed.add(number(1))
    whats = [notice.what for notice in closed(feed)]
    assert whats == [
        "tracking: t failed, and is tried again",
        "tracking: t is told nothing more of this run",
    ]
    feed.add(number(2))
    assert told.calls == [("begin", "")]


def test_a_slow_tracker_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MOST_WAITING", 5)
    gate = threading.Event()
    told = Told(gate=gate)
    feed = Feed("t", told)
    feed.add(number(1))
    feed.finish("finished")
    wait_for("the first call", lambda: not feed._waiting)
    for step in range(2, 12):
        feed.add(number(step))
    feed.join(0.05)
    gate.set()
    feed.join(30)
    whats = {notice.what for notice in feed.notices()}
    assert "tracking: t did not take in all numbers before the run ended" in whats
    assert "tracking: t was too slow for all numbers" in whats


def job(**tracking: Any) -> Job:
    return Job(task="/p/a.py:B", steps=3, name="line", tracking=tracking)


def test_a_missing_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    require(job())
    for name, asked in (("mlflow", {"uri": "http://h"}), ("wandb", {"mode": "offline"})):
        with pytest.raises(JobError, match=f"package {name}") as caught:
            require(job(**{name: asked}))
        assert f"pip install '.[{name}]'" in caught.value.hint


def test_a_folder_called_like_a_package_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B itself makes a folder `wandb` where a run starts."""
    for name in ("wandb", "mlflow"):
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for asked in ({"mlflow": {"uri": "http://h"}}, {"wandb": {"mode": "offline"}}):
        with pytest.raises(JobError, match="is not installed"):
            require(job(**asked))
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    require(job(wandb={"mode": "offline"}))


def test_fields_are_flat_texts() -> None:
    settings = {"a": {"b": [1, 2]}, "c": "x" * 900, "api_key": "hunter2"}
    found = fields_of(job().model_copy(update={"settings": settings}))
    assert (found["tracking.wandb.mode"], found["tracking.mlflow.uri"]) == ("off", "null")
    assert (found["settings.a.b"], found["settings.c"]) == ("[1, 2]", "x" * 500)
    assert found["settings.api_key"] == "[redacted]"


def run_with(asked: Job, folder: Path, steps: range, status: str) -> list[Noticed]:
    folder.mkdir(exist_ok=True)
    told = Trackers(asked, folder, version="1")
    for step in steps:
        told.add(1_700_000_000.0 + step, step, {"train/loss": 1.0 / step})
    return told.close(status, wait_s=120.0)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file, as far as it is written: after 7 bytes, LevelDB's log format.

    A block of 32 KiB holds pieces: checksum, length, kind (whole, first, middle, last), bytes.
    """
    assert b":W&B".startswith(data[:4])
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.timeout(180)
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="raycloud[wandb] is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    asked = job(wandb={"mode": "offline", "project": "lines"})
    folder = tmp_path / "run-7"
    assert run_with(asked, folder, range(1, 4), "stopped") == []
    assert run_with(asked, folder, range(3, 6), "finished") == []
    known = json.loads((folder / "tracking.json").read_text())["runs"]["wandb"]
    found: list[tuple[float, float]] = []

    def written() -> list[Any] | None:
        """W&B's own process writes the last of a run after it has said that it is finished."""
        files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
        told = [[*map(Record.FromString, wandb_records(file.read_bytes()))] for file in files]
        ended = [records for records in told if any(one.HasField("exit") for one in records)]
        return told if len(ended) == 2 else None

    for record in [one for records in wait_for("both files", written) for one in records]:
        if record.HasField("run"):
            assert (record.run.run_id, record.run.project) == (known, "lines")
            assert record.run.display_name == "run-7"
            config = {i.key or i.nested_key[0]: i.value_json for i in record.run.config.update}
            assert json.loads(config["steps"]) == "3"
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            found.append((json.loads(items["step"]), json.loads(items["train/loss"])))
    assert found == [(s, pytest.approx(1 / s)) for s in (1, 2, 3, 3, 4, 5)]


@pytest.fixture
def mlflow_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where MLflow keeps runs: a database file, or a server that keeps them in one."""
    pytest.importorskip("mlflow", reason="raycloud[mlflow] is not installed")
    pytest.importorskip("sqlalchemy", reason="raycloud[mlflow] is not installed")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    if request.param == "file":
        yield store
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scripts = Path(sys.executable).parent
    with command(
        tmp_path / "server", scripts / "mlflow", "server", "--backend-store-uri", store,
        "--default-artifact-root", tmp_path / "artifacts", "--host", "127.0.0.1",
        "--port", str(port), "--workers", "1",
        PATH=f"{scripts}:{os.environ['PATH']}",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",  # of evaluations, which need more packages
    ) as server:  # fmt: skip
        wait_for("MLflow's server", lambda: server.ended() or healthy(port))
        assert not server.ended(), server.err
        yield f"http://127.0.0.1:{port}"
        server.process.terminate()  # it ends its own workers
        server.code()


def healthy(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # not yet
        return False


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, which mlflow gets
@pytest.mark.parametrize("mlflow_store", variants("file", "server"), indirect=True)
def test_mlflow(mlflow_store: str, tmp_path: Path) -> None:
    asked = job(mlflow={"uri": mlflow_store, "experiment": "lines"})
    folder = tmp_path / "run-7"
    assert run_with(asked, folder, range(1, 4), "stopped") == []
    assert run_with(asked, folder, range(3, 6), "finished") == []
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=mlflow_store)
    experiment = client.get_experiment_by_name("lines")
    (run,) = client.search_runs([experiment.experiment_id])
    known = json.loads((folder / "tracking.json").read_text())["runs"]["mlflow"]
    assert (run.info.run_id, run.info.status, run.info.run_name) == (known, "FINISHED", "run-7")
    assert run.data.params["steps"] == "3"
    history = client.get_metric_history(known, "train/loss")
    assert {(m.step, m.value) for m in history} == {(s, 1 / s) for s in range(1, 6)}
