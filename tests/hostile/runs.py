"""What lies in a run directory that someone else wrote."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycloud.errors import RunDirectoryError
from raycloud.on_ray.cluster import read_known
from raycloud.order import Position, read_ledger
from raycloud.planner.plan import from_json
from raycloud.report.audit import audit, audited_text
from raycloud.report.summary import of_run
from raycloud.spec import RunDirectory, choose
from tests.hostile.jobs import Payload
from tests.hostile_forks import Case

_DEEP = "[" * 200_000
_STARTED = '{"format":1,"t":1.0,"event":"Noticed","what":"a","member":null,"detail":{}}\n'
_LEDGER = '{"format":2,"kind":"ledger","samples":10}\n'


def _case(name: str, content: str | bytes | Callable[[Path], Any], says: str, act: Any) -> Case:
    def make(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        else:
            text = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(text)

    return Case(make=make, open=act, error=RunDirectoryError, says=says)


def _events(content: Any, says: str) -> Case:
    return _case("events.jsonl", content, says, of_run)


def _event(says: str, **fields: Any) -> Case:
    return _events(_STARTED + json.dumps({"format": 1, "t": 2.0, **fields}) + "\n", says)


def _plan(content: Any, says: str = "plan") -> Case:
    def act(folder: Path) -> None:
        from_json((folder / "plan.json").read_text(encoding="utf-8", errors="replace"))

    return _case("plan.json", content, says, act)


def _plan_of_run(content: Any) -> Case:
    def make(folder: Path) -> None:
        (folder / "events.jsonl").write_text(_STARTED)
        if callable(content):
            content(folder / "plan.json")
        else:
            (folder / "plan.json").write_bytes(content)

    return Case(make=make, open=of_run, error=RunDirectoryError, says="plan.json")


def _ledger(content: Any, says: str = "ledger") -> Case:
    def act(folder: Path) -> None:
        with (folder / "ledger").open(encoding="utf-8", errors="replace") as file:
            found = read_ledger(file)
        raise RunDirectoryError(str(found.audit(Position(epoch=1, offset=0))))

    return _case("ledger", content, says, act)


def _record(record: Any, says: str = "ledger") -> Case:
    return _ledger(_LEDGER + json.dumps(record) + "\n", says)


def _audited(
    ledger: str | Callable[[Path], Any], says: str, *, steps: int = 2, job: str = ""
) -> Case:
    """A run that has ended at `steps`, with a ledger that is refused, or found to be not exact."""

    def make(folder: Path) -> None:
        (folder / "job.yaml").write_text(f"{_JOB}{job}")
        (folder / "events.jsonl").write_text(_ENDED.replace("STEPS", str(steps)))
        if callable(ledger):
            ledger(folder / "ledger")
        else:
            (folder / "ledger").write_text(ledger)

    def act(folder: Path) -> None:
        found = audit(folder)
        assert not found.ledger.exact
        text = audited_text(found)
        raise RunDirectoryError(text if len(text) < 1500 else f"{text[:500]} {text[-1000:]}")

    return Case(make=make, open=act, error=RunDirectoryError, says=says)


def _commits(*changed: dict[str, int]) -> str:
    return "".join(json.dumps({"commit": {**_COMMIT, **one}}) + "\n" for one in changed)


def _restored(ranges: Any) -> str:
    state = {"samples": 10**6, "next_step": 1, "ranges": ranges}
    return _LEDGER.replace("10", "1000000") + json.dumps({"restore": state}) + "\n"


def _holes(count: int) -> Any:
    pairs = [[4 * n, 4 * n + 2] for n in range(count)]
    return [{"epoch": 0, "epochs": 1, "committed": pairs, "left_out": []}]


def _known(content: Any) -> Case:
    return _case("data.json", content, "data.json", lambda f: read_known(f / "data.json"))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _resume(folder: Path) -> None:
    choose(folder / "a\0b", "name", resume=True)


_COMMIT = {"first_step": 0, "last_step": 1, "epoch": 0, "start": 0, "stop": 8, "generation": 1}

_JOB = "task: os:system\nsteps: 2\nglobal_batch: 8\nmicro_batch: 4\n"
_ENDED = (
    '{"format":1,"t":1.0,"event":"RunStarted","job":"a","version":"1"}\n'
    '{"format":1,"t":2.0,"event":"GenerationFormed","generation":0,"members":[0],"shares":[2],'
    '"first_step":0}\n'
    '{"format":1,"t":3.0,"event":"RunFinished","status":"finished","steps":STEPS}\n'
)
_SECOND = {"first_step": 1, "last_step": 2, "start": 8, "stop": 10}

CASES = {
    "events: deep": _events(_DEEP + "\n", "line 1"),
    "events: a pickle": _events(pickle.dumps(Payload(), 0) + b"\n", "line 1"),
    "events: 1 TB without a line end": _events(_sparse, "line 1"),
    "events: a line of 300 MB": _events(lambda p: p.write_bytes(b" " * 300 * 10**6), "line 1"),
    "events: a pipe": _events(os.mkfifo, "events.jsonl"),
    "events: a kind that is a class": _event("unknown event", event="os.system"),
    "events: a kind of tomorrow": _event("unknown event", event="Teleported"),
    "events: a format of tomorrow": _events('{"format":99,"t":0}\n', "format"),
    "events: no object": _events("[1]\n", "line 1"),
    "events: fields of other kinds": _event(
        "line 2", event="RunFinished", status="finished", steps="../../etc/passwd", error=None
    ),
    "events: a time that is no number": _events(_STARTED.replace("1.0", '"x"'), "line 1"),
    "events: a time beyond all": _events(_STARTED.replace("1.0", "1e999"), "line 1"),
    "plan: deep": _plan(_DEEP),
    "plan: a pickle": _plan(pickle.dumps(Payload(), 0)),
    "plan: names that do not belong": _plan('{"format":1,"members":[{"__class__":"os"}]}'),
    "plan of a run: deep": _plan_of_run(_DEEP.encode()),
    "plan of a run: 1 TB": _plan_of_run(_sparse),
    "ledger: deep": _ledger(_LEDGER + _DEEP + "\n" + _LEDGER),
    "ledger: a pickle": _ledger(pickle.dumps(Payload(), 0) + b"\n\n."),
    "ledger: no header": _ledger(json.dumps({"commit": _COMMIT}) + "\n"),
    "ledger: a format of tomorrow": _ledger(_LEDGER.replace("2", "99"), "format"),
    "ledger: samples below zero": _ledger(_LEDGER.replace("10", "-10")),
    "ledger: samples beyond all": _ledger(_LEDGER.replace("10", "9" * 5000)),
    "ledger: a range outside the epoch": _record({"commit": {**_COMMIT, "stop": 2**62}}),
    "ledger: epochs below zero": _record({"commit": {**_COMMIT, "epochs": -(2**62)}}),
    "ledger: a trillion epochs": _record({"commit": {**_COMMIT, "epochs": 10**12}}, "missing"),
    "ledger: restored from nonsense": _record({"restore": {"next_step": "x", "epochs": 7}}),
    "ledger: restored from lists": _record(
        {"restore": {"format": 1, "next_step": 1, "samples": 10, "stretches": [[[[[]]]]]}}
    ),
    "audit: 1 TB without a line end": _audited(_sparse, "ledger"),
    "audit: a pipe": _audited(os.mkfifo, "no regular file"),
    "audit: ever deeper": _audited(_LEDGER + _DEEP + "\n" + _LEDGER, "line 2 of the ledger"),
    "audit: a hundred thousand times the same": _audited(
        _LEDGER + _commits({}) * 100_000, "and 981 more, which --json names"
    ),
    "audit: every other record of a hundred thousand": _audited(
        lambda path: path.write_text(
            _LEDGER + _commits(*({"epoch": n, "stop": 10} for n in range(0, 100_000, 2)))
        ),
        "the rest was not read",
    ),
    "audit: two samples fewer": _audited(
        _LEDGER + _commits({}, {**_SECOND, "start": 9}), "epoch 0 [8, 9)"
    ),
    "audit: samples of a step that the run never did": _audited(
        _LEDGER + _commits({}, _SECOND), "steps [1, 2)", steps=1
    ),
    "audit: records that end before the run": _audited(
        _LEDGER + _commits({}), "epoch 0 [8, 10), steps [1, 2): in no record"
    ),
    "audit: a run of more steps than there is time": _audited(
        _LEDGER + _commits({}), "missing", steps=2**62
    ),
    "audit: steps beyond all": _audited(
        _LEDGER + _commits({"last_step": 2**200}), "misplaced", steps=1
    ),
    "audit: a trillion epochs away": _audited(_LEDGER + _commits({"epoch": 10**12}), "missing"),
    "audit: large enough in a trillion epochs": _audited(
        _LEDGER.replace("10", "4") + '{"grow":{"epoch":1000000000000,"samples":9}}\n',
        "not of this run's job",
        job="drop_last: true\n",
    ),
    "audit: a checkpoint of twenty thousand holes": _audited(
        lambda path: path.write_text(_restored(_holes(20_000))), "the rest was not read"
    ),
    "audit: a checkpoint with more than there is": _audited(
        _restored(_holes(2)).replace("[4, 6]", "[4, 9000000]"), "line 2 of the ledger is damaged"
    ),
    "audit: a checkpoint of nothing": _audited(
        _restored([{"epoch": 0, "epochs": 1, "committed": [], "left_out": []}]), "damaged"
    ),
    "audit: a checkpoint of floats": _audited(_restored(_holes(1)).replace("2]", "2.5]"), "line 2"),
    "data: deep": _known(_DEEP),
    "data: a pickle": _known(pickle.dumps(Payload())),
    "data: 1 TB": _known(_sparse),
    "data: names that do not belong": _known('{"format":1,"inputs":[{"path":"a","run":"b"}]}'),
    "data: no list": _known('{"format":1,"inputs":{"a":1}}'),
    "a directory's name with a zero byte": _case("a", "", "", _resume),
    "a job that is 1 TB": Case(
        make=lambda folder: _sparse(folder / "job.yaml"),
        open=lambda folder: RunDirectory(folder).job(),
        error=Exception,
        says="larger",
    ),
}
