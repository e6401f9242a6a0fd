"""The event log: its lines, torn ones, redaction; and the recorder that writes it."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raycloud.clock import VirtualClock
from raycloud.errors import InternalError, MachineError, RunDirectoryError
from raycloud.events import (
    CheckpointPublished,
    DataPrepared,
    Evaluated,
    Event,
    GenerationFormed,
    MemberLost,
    Noticed,
    PartWritten,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.redact import redact, redact_text
from raycloud.report.data import brief
from raycloud.report.log import cut_torn_line, read_events, to_line
from raycloud.report.recorder import Recorder, ScalarFile
from raycloud.spec.rundir import RunDirectory
from tests.logs import from_line

GOLDEN = Path(__file__).parent / "golden" / "events.jsonl"


def commit(first: int, last: int, loss: float = 2.5) -> StepsCommitted:
    return StepsCommitted(
        member=0,
        generation=0,
        first_step=first,
        last_step=last,
        epoch=1,
        offset=64,
        loss=loss,
        weight=8.0,
        samples=8 * (last - first),
        micro_batches=2,
        grad_norm=0.5,
        learning_rate=0.001,
        wall_s=2.0,
        compute_s=1.5,
        data_s=0.25,
        exchange_s=0.125,
        cpu_s=1.75,
        bytes_sent=1024,
        bytes_dense=2048,
        read_s=0.5,
        collate_s=0.75,
        computed=16 * (last - first),
    )


PREPARED = DataPrepared(
    member=0,
    split="train",
    rows=60,
    bytes=4096,
    blocks=3,
    cached_blocks=1,
    partitions=8,
    bad_rows=1,
    bad=("a.csv, row 7: no label",),
    inputs=({"path": "a.csv", "bytes": 512, "digest": "ab"},),
    seconds=1.5,
    read_s=0.5,
    price_per_gb_month=0.02,
)
FORMED = GenerationFormed(generation=0, members=(0,), shares=(2,), first_step=0, keys=((0, 0),))
WRITTEN = PartWritten(
    member=0, step=5, part={"n": [1]}, blocked_s=0.5, write_s=0.25, replica=0, position=0
)
EVENTS: list[tuple[float, Event]] = [
    (1700000000.0, RunStarted(job="gpt", version="0.1.0")),
    (1700000001.0, brief(PREPARED)),
    (1700000001.25, FORMED),
    (1700000002.5, commit(0, 4)),
    (1700000002.75, commit(4, 5, loss=math.nan)),
    (1700000003.0, WRITTEN),
    (1700000003.5, CheckpointPublished(step=5, path="c/5", state_bytes=64, write_s=0.5)),
    (1700000004.0, Evaluated(step=5, metrics={"loss": math.inf, "auc": 0.5}, sample="ä\n\x1b")),
    (1700000005.0, RunFinished(status="finished", steps=5)),
]


def test_golden_lines() -> None:
    assert [to_line(t, event) for t, event in EVENTS] == GOLDEN.read_text().splitlines()


def test_lines_come_back() -> None:
    entries = [from_line(line) for line in GOLDEN.read_text().splitlines()]
    assert repr(entries) == repr(EVENTS)
    for line in GOLDEN.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN
        assert line.isascii()


def keyless(event: Event) -> Event:
    """As it was before events had the replica and the position of a member."""
    if isinstance(event, GenerationFormed):
        return replace(event, keys=())
    return replace(event, replica=-1) if isinstance(event, PartWritten) else event


def test_lines_from_before_members_had_keys_are_read() -> None:
    lines = GOLDEN.with_name("events-before-keys.jsonl").read_text().splitlines()
    assert repr([from_line(line) for line in lines]) == repr([(t, keyless(e)) for t, e in EVENTS])


def test_lines_from_before_members_told_what_all_compute_are_read() -> None:
    lines = GOLDEN.with_name("events-before-computed.jsonl").read_text().splitlines()
    read = [from_line(line)[1] for line in lines]
    known = [keyless(event) for _, event in EVENTS]
    before = [replace(e, computed=0) if isinstance(e, StepsCommitted) else e for e in known]
    assert repr(read) == repr(before)


def test_lines_from_before_gradients_were_encoded_are_read() -> None:
    lines = GOLDEN.with_name("events-before-codecs.jsonl").read_text().splitlines()
    assert repr([from_line(line) for line in lines]) == repr(EVENTS)


def test_lines_from_before_noise_was_measured_are_read() -> None:
    lines = GOLDEN.with_name("events-before-noise.jsonl").read_text().splitlines()
    assert repr([from_line(line) for line in lines]) == repr(EVENTS)


def test_lines_from_before_steps_had_a_median_are_read() -> None:
    lines = GOLDEN.with_name("events-before-medians.jsonl").read_text().splitlines()
    assert repr([from_line(line) for line in lines]) == repr(EVENTS)


def test_lines_from_before_rounds_were_told_are_read() -> None:
    lines = GOLDEN.with_name("events-before-periods.jsonl").read_text().splitlines()
    assert repr([from_line(line) for line in lines]) == repr(EVENTS)


def test_lines_from_before_data_was_prepared_are_read() -> None:
    lines = GOLDEN.with_name("events-before-data.jsonl").read_text().splitlines()
    entries = [entry for entry in EVENTS if not isinstance(entry[1], DataPrepared)]
    for (t, event), line in zip(entries, lines, strict=True):
        steps = isinstance(event, StepsCommitted)
        then = replace(event, read_s=0.0, collate_s=0.0, computed=0) if steps else keyless(event)
        assert repr(from_line(line)) == repr((t, then))


def test_a_brief_word_of_prepared_data_counts_its_files() -> None:
    short = brief(PREPARED)
    assert (short.inputs, short.files) == ((), 1)
    assert brief(short) == short
    assert replace(short, inputs=PREPARED.inputs, files=0) == PREPARED


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(InternalError, match="Noticed cannot be written"):
        to_line(0.0, Noticed(what="x", detail={"path": Path("x")}))


def log(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    return path


def test_a_torn_last_line_is_left_out_and_then_cut(tmp_path: Path) -> None:
    whole = to_line(1.0, MemberLost(member=1, reason="died")) + "\n"
    path = log(tmp_path, whole + whole[:20])
    assert len(list(read_events(path))) == 1
    assert cut_torn_line(path) == 20
    assert path.read_text() == whole
    assert cut_torn_line(path) == 0
    assert cut_torn_line(tmp_path / "missing") == 0


@pytest.mark.parametrize("size", [0, 10, 65_535, 65_536, 65_537, 200_000])
def test_cutting_finds_the_line_end_at_any_distance(tmp_path: Path, size: int) -> None:
    for head in ("", "first\n"):
        path = log(tmp_path, head + "x" * size)
        assert cut_torn_line(path) == size
        assert path.read_text() == head


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 cannot be read"),
        ("[]", "it is no JSON object"),
        ('{"format":3,"t":1,"event":"RunStarted"}', "its format is 3, this raycloud reads 1 and 2"),
        ('{"format":1,"t":1,"event":"Teleported"}', "unknown event 'Teleported'.*newer raycloud"),
        ('{"format":1,"t":1,"event":"RunStarted"}', "a field is missing"),
        ('{"format":1,"event":"RunStarted","job":"x","version":"1"}', "a field is missing"),
    ],
)
def test_a_bad_line_in_the_middle_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    path = log(tmp_path, line + "\n" + to_line(1.0, FORMED) + "\n")
    with pytest.raises(RunDirectoryError, match=problem):
        list(read_events(path))


SECRETS = [
    ("s3://key:hunter2@host/x", "s3://[redacted]@host/x"),
    ("https://ghtoken@host/x", "https://[redacted]@host/x"),
    (
        "http://host/x?a=1&X-Amz-Signature=abc&b=2",
        "http://host/x?a=1&X-Amz-Signature=[redacted]&b=2",
    ),
    ("password=hunter2 next", "password=[redacted] next"),
    ("{'api_key': 'hunter2', 'n': 1}", "{'api_key': '[redacted]', 'n': 1}"),
    ('{"HF_TOKEN": "hunter2"}', '{"HF_TOKEN": "[redacted]"}'),
    ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=[redacted]"),
    ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer [redacted]"),
    ("key AKIAABCDEFGHIJKLMNOP!", "key [redacted]!"),
    ("ghp_abcdefghij0123456789ABCD", "[redacted]"),
    ("hf_abcdefghijABCDEFGHIJ0", "[redacted]"),
    ("sk-proj-abcdefghij0123456789", "[redacted]"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", "[redacted]"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- x", "[redacted] x"),
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_secrets_are_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "token_embedding.weight",
        "unexpected token: else",
        "tokens=5 per second",
        "https://host/x?page=2",
        "me@example.com",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "def signature(token): return secret",
        "transformer.sk-learn",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


def test_fields_with_a_secret_name_go_whole() -> None:
    value = {"password": "x y", "token": 5, "list": ["https://a:b@c/"], "digest": "ab"}
    assert redact(value) == {
        "password": "[redacted]",
        "token": 5,
        "list": ["https://[redacted]@c/"],
        "digest": "ab",
    }


def recorder(tmp_path: Path, clock: VirtualClock, started_s: float | None = None) -> Recorder:
    return Recorder(RunDirectory(tmp_path), clock, started_s=started_s)


def first_session(tmp_path: Path) -> None:
    clock = VirtualClock(1_700_000_100.0)
    with recorder(tmp_path, clock, started_s=clock.monotonic_s() - 3.0) as made:
        made.record(RunStarted(job="gpt", version="0.1.0"))
        clock.advance(1.0)
        made.record(FORMED)
        clock.advance(2.0)
        made.record(commit(0, 4, loss=4.0))
        clock.advance(1.0)
        made.record(commit(4, 8, loss=3.0))
        made.append_ledger(["0 32", "32 64"])
        made.append_ledger([])


def scalars(tmp_path: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    return [(point.step, point.value) for point in read.Scalars(tag)]


def test_the_recorder_writes_as_things_happen(tmp_path: Path) -> None:
    clock = VirtualClock(1_700_000_100.0)
    with recorder(tmp_path, clock) as made:
        made.record(FORMED)
        made.append_ledger(["0 32"])
        assert [event for _, event in read_events(tmp_path / "events.jsonl")] == [FORMED]
        assert (tmp_path / "ledger").read_text() == "0 32\n"
        assert not (tmp_path / "tensorboard").exists()  # nothing heavy before the first step
        made.record(Noticed(what="reading https://a:b@c/"))
        assert "a:b" not in (tmp_path / "events.jsonl").read_text()
    made.close()


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        recorder(tmp_path, VirtualClock()),
        pytest.raises(RunDirectoryError, match="another process"),
    ):
        recorder(tmp_path, VirtualClock())
    recorder(tmp_path, VirtualClock()).close()


def test_the_run_starts_when_its_command_started(tmp_path: Path) -> None:
    first_session(tmp_path)
    times = [t for t, _ in read_events(tmp_path / "events.jsonl")]
    assert times == [1_700_000_097.0, 1_700_000_101.0, 1_700_000_103.0, 1_700_000_104.0]
    made = recorder(tmp_path, VirtualClock(1_700_000_200.0))
    summary = made.publish_summary(predicted={"step_s": 0.25})
    made.close()
    assert (summary.first_step_s, summary.steps, summary.predicted) == (6.0, 8, {"step_s": 0.25})
    assert json.loads((tmp_path / "summary.json").read_text())["format"] == 1


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    first_session(tmp_path)
    assert scalars(tmp_path, "train/loss") == [(4, 4.0), (8, 3.0)]
    assert scalars(tmp_path, "train/bytes_sent") == [(4, 1024.0), (8, 2048.0)]
    assert scalars(tmp_path, "train/samples_per_s") == [(4, 16.0), (8, 16.0)]
    assert scalars(tmp_path, "train/grad_norm")[0] == (4, 0.5)
    assert scalars(tmp_path, "train/learning_rate")[0] == (4, pytest.approx(0.001))


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    first_session(tmp_path)
    with (tmp_path / "ledger").open("a") as ledger, (tmp_path / "events.jsonl").open("a") as events:
        ledger.write("64 9")  # killed while it wrote
        events.write('{"format":1,"t":17')
    clock = VirtualClock(1_700_000_200.0)
    with recorder(tmp_path, clock) as made:
        assert (made.tally.steps, made.tally.samples) == (8, 64)
        made.record(RunStarted(job="gpt", version="0.1.0", resumed_from_step=4))
        made.record(FORMED)
        made.append_ledger(["32 64"])
        clock.advance(5.0)
        made.record(commit(4, 6, loss=2.0))
        made.record(Evaluated(step=6, metrics={"loss": 1.5}))
        made.record(commit(6, 7, loss=math.nan))
        summary = made.publish_summary()
    assert (summary.steps, summary.first_step_s) == (7, 5.0)
    assert (tmp_path / "ledger").read_text() == "0 32\n32 64\n32 64\n"
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 9
    assert scalars(tmp_path, "train/loss") == [(4, 4.0), (6, 2.0)]
    assert scalars(tmp_path, "eval/loss") == [(6, 1.5)]


def test_two_scalar_files_of_one_second(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(ScalarFile(tmp_path / "tensorboard", 1.0, first_step=step - 1)) as file:
            file.add(1.0, step, {"x": float(step)})
    assert scalars(tmp_path, "x") == [(1, 1.0), (2, 2.0)]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot open .*events.jsonl: No such file"):
        recorder(tmp_path / "missing", VirtualClock())
