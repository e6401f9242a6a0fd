"""The fold of a log that is kept beside it: what goes on from it is what reads all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycloud.clock import VirtualClock
from raycloud.events import (
    CheckpointPublished,
    DataPrepared,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    Noticed,
    Recovered,
    RolledBack,
    RunFinished,
    RunStarted,
)
from raycloud.report import log, snapshot
from raycloud.report.recorder import Recorder
from raycloud.report.snapshot import continued, keep, path_of, snapshot_of, state_of
from raycloud.report.state import RunState
from raycloud.report.summary import summarize
from raycloud.spec.rundir import RunDirectory
from tests.logs import STARTED_T, commit, entries, ready

GOLDEN = Path(__file__).parent / "golden" / "events.snapshot.json"


def long() -> list[Event]:
    """A run with one of each trouble: a loss, a roll-back, a resume, one that is taken over."""
    prepared = DataPrepared(
        member=0, split="train", rows=9, bytes=90, blocks=1, cached_blocks=0, partitions=1,
        bad_rows=1, bad=("a:3",), inputs=({"path": "a", "bytes": 90},), seconds=1.0,
        read_s=0.5, version=0, waited_s=0.5, price_per_gb_month=0.02,
    )  # fmt: skip
    return [
        *(event for _, event in entries(status="")),
        prepared,
        CheckpointPublished(step=8, path="8", state_bytes=4, write_s=0.1),
        MemberLost(member=1, reason="its node died"),
        GenerationFormed(generation=1, members=(0,), shares=(2,), first_step=10),
        commit(0, 10, 12, generation=1, loss=float("nan")),
        Recovered(generation=1, lost=(1,), cause="its node died", detected_s=3.5, resumed_s=4.25),
        Evaluated(step=12, metrics={"loss": 1.5}, sample="ab"),
        Noticed(what="passes are smaller", member=0, detail={"was": 4, "ids": [1, 2]}),
        *(commit(0, step, step + 1, generation=1) for step in range(12, 18)),
        RolledBack(step=8),
        ready(2),
        GenerationFormed(generation=2, members=(0, 2), shares=(1, 1), first_step=8),
        *(commit(m, step, step + 1, generation=2) for step in range(8, 20) for m in (0, 2)),
        RunStarted(job="gpt", version="0.1.0", resumed_from_step=None, taken_over=(0, 2)),
        *(commit(m, 20, 22, generation=2) for m in (2, 0)),
        MemberFailed(member=0, error="TaskError", message="no"),
        RunFinished(status="failed", steps=22, error="no"),
        RunStarted(job="gpt", version="0.1.0", resumed_from_step=8),
        ready(0),
        GenerationFormed(generation=3, members=(0,), shares=(2,), first_step=8),
        commit(0, 8, 14, generation=3),
    ]


def written(path: Path) -> Path:
    """Their log."""
    found = [
        log.to_line(STARTED_T + n, event, (event.member, n) if hasattr(event, "member") else None)
        for n, event in enumerate(long())
    ]
    path.write_text("".join(line + "\n" for line in found))
    return path


def kept(path: Path) -> None:
    """Make its snapshot now."""
    state, tail, _ = continued(path)
    keep(path, state, size=tail.at, lines=tail.lines)


def as_kept(fold: RunState) -> str:
    """All that a fold holds."""
    whole = snapshot.Snapshot(format=0, size=0, lines=0, digest="", fold=fold)
    return snapshot._adapter().dump_json([whole]).decode()


def test_whoever_goes_on_from_it_comes_to_the_same(tmp_path: Path) -> None:
    whole = written(tmp_path / "events.jsonl")
    expected = as_kept(state_of(whole))
    lines = whole.read_text().splitlines(keepends=True)
    for cut in range(len(lines) + 1):
        run = tmp_path / str(cut)
        run.mkdir()
        path = run / "events.jsonl"
        path.write_text("".join(lines[:cut]))
        kept(path)
        assert snapshot_of(path) is not None
        with path.open("a") as file:
            file.writelines(lines[cut:])
        assert as_kept(state_of(path)) == expected, f"cut before line {cut + 1}"


def test_what_was_kept_is_not_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    kept(path)
    before = as_kept(state_of(path))
    with path.open("a") as file:
        file.write(log.to_line(STARTED_T + 99, Noticed(what="more")) + "\n")
    with path.open("r+b") as file:
        file.write(b"{")  # the same: within what is digested
    assert snapshot_of(path) is not None
    with path.open("r+b") as file:
        file.seek(5)
        file.write(b"!")
    assert snapshot_of(path) is None
    with path.open("r+b") as file:
        file.seek(5)
        file.write(log.to_line(STARTED_T, long()[0]).encode()[5:6])
    assert as_kept(state_of(path)) != before
    found = snapshot_of(path)
    assert found is not None
    assert found.lines == len(long())
    assert as_kept(found.fold) == before


def test_the_bytes_before_those_that_are_digested_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_DIGESTED_BYTES", 16)
    path = written(tmp_path / "events.jsonl")
    expected = as_kept(state_of(path))
    kept(path)
    with path.open("r+b") as file:
        file.write(b"#" * 200)
    assert as_kept(state_of(path)) == expected


def test_a_recorder_keeps_it_as_the_log_grows_and_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "EVERY", 20)
    run, clock = RunDirectory(tmp_path), VirtualClock()
    with Recorder(run, clock) as recorder:
        for event in long():
            clock.advance(1.0)
            recorder.record(event)
        recorder.flush()
        expected = as_kept(recorder.state)
    found = snapshot_of(run.events_jsonl)
    assert found is not None
    assert 0 < found.size < run.events_jsonl.stat().st_size
    assert found.lines == run.events_jsonl.read_bytes()[: found.size].count(b"\n")
    assert as_kept(state_of(run.events_jsonl)) == expected
    with Recorder(run, clock) as recorder:
        assert as_kept(recorder.state) == expected
        for event in long():
            clock.advance(1.0)
            recorder.record(event)
    path_of(run.events_jsonl).unlink()
    assert as_kept(state_of(run.events_jsonl)) == as_kept(recorder.state)


def test_a_summary_is_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    expected = summarize(state_of(path).tally)
    kept(path)
    assert repr(summarize(state_of(path).tally)) == repr(expected)


def test_one_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "EVERY", 5)
    run, clock = RunDirectory(tmp_path), VirtualClock()
    path_of(run.events_jsonl).mkdir()
    with Recorder(run, clock) as recorder:
        for event in long():
            recorder.record(event)
    assert snapshot_of(run.events_jsonl) is None
    assert as_kept(state_of(run.events_jsonl)) == as_kept(recorder.state)
    told = [event for _, event in log.read_events(run.events_jsonl) if isinstance(event, Noticed)]
    assert [event.what for event in told].count("the log has no snapshot") == 1


DAMAGES = {
    "none": lambda text: None,
    "empty": lambda text: b"",
    "torn": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: b"\xff\xfe",
    "an empty list": lambda text: b"[]",
    "deep": lambda text: b"[" * 100_000,
    "another format": lambda text: text.replace(b'"format":6', b'"format":5'),
    "another kind": lambda text: text.replace(b'"size":', b'"size":"x",'),
    "of a longer log": lambda text: text.replace(b'"size":', b'"size":1'),
    "of less than nothing": lambda text: text.replace(b'"size":', b'"size":-'),
    "of part of a line": lambda text: text.replace(b'"size":', b'"size":1.0,"was":'),
    "of very many values": lambda text: text.replace(
        b'"spawned":[', b'"spawned":[' + b"1," * 10**6
    ),
    "larger than any": lambda text: b" " * (33 << 20),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_is_damaged_is_passed_over(damage: str, tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    expected = as_kept(state_of(path))
    kept(path)
    text = DAMAGES[damage](path_of(path).read_bytes())
    path_of(path).unlink() if text is None else path_of(path).write_bytes(text)
    assert snapshot_of(path) is None
    assert as_kept(state_of(path)) == expected


def test_one_of_another_log_is_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    kept(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[-1].replace("0.1", "0.2"), lines[-1]]))
    assert snapshot_of(path) is None
    path.write_text("".join(lines[:-1]))
    assert snapshot_of(path) is None


def test_golden(tmp_path: Path) -> None:
    """What this version keeps: where this fails raise `FORMAT`, for older ones lie beside logs."""
    path = written(tmp_path / "events.jsonl")
    assert snapshot.FORMAT == 6
    assert json.loads(as_kept(state_of(path))) == json.loads(GOLDEN.read_text())
