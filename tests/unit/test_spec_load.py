"""Jobs from text and back: YAML's meaning, overrides, paths, and the round trip."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.errors import SpecError
from raycloud.spec import Job, dump_job, load_job
from raycloud.spec.yaml_text import YamlRefusedError, parse, write


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "gpt.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text("task: gpt.py:Gpt\nsteps: 10\nelastic:\n  max_workers: 4\nsync: exact\n")
    return path


def test_a_file(job_file: Path) -> None:
    job = load_job(str(job_file))
    assert job == Job(task=f"{job_file.parent}/gpt.py:Gpt", steps=10, elastic={"max_workers": 4})


def test_a_file_with_a_byte_order_mark(job_file: Path) -> None:
    job_file.write_bytes(b"\xef\xbb\xbf" + job_file.read_bytes())
    assert load_job(job_file).steps == 10


def test_overrides_replace_the_last_one_wins(job_file: Path) -> None:
    job = load_job(
        job_file,
        [
            "steps=5",
            "steps=7",
            "elastic.shares=[5,2,1]",
            "elastic.min_workers=3",
            "elastic.max_workers=3",
            "sync.period=1",
            "clip_norm=1e-1",
            "settings.model.width=64",
            "settings.note=a=b, c",
            "data.path=s3://bucket/text",
            "checkpoint.every_steps=",
            "name='7'",
        ],
    )
    assert (job.steps, job.elastic.shares, job.clip_norm) == (7, (5, 2, 1), 0.1)
    assert job.settings == {"model": {"width": 64}, "note": "a=b, c"}
    assert job.data.path == "s3://bucket/text"
    assert job.checkpoint.every_steps is None
    assert job.name == "7"


def test_an_override_may_repair_a_file(job_file: Path) -> None:
    job_file.write_text(job_file.read_text() + "epochs: 3\n")
    assert load_job(job_file, ["steps=null"]).epochs == 3


def test_a_relative_task_file_starts_at_the_job_file(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job_file.parent.parent)
    relative = Path(job_file.parent.name) / job_file.name
    assert load_job(relative).task == f"{job_file.parent}/gpt.py:Gpt"


def test_a_data_path_starts_at_the_current_directory(
    job_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    job = load_job(job_file, ["data.path=text"])
    assert job.data.path == "text"
    assert job.resolved().data.path == f"{elsewhere}/text"


def test_files_need_not_be_there_where_they_are_not_checked(job_file: Path) -> None:
    (job_file.parent / "gpt.py").unlink()
    assert load_job(job_file, check_files=False).steps == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("+3", 3),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("no", "no"),
        ("True", True),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("[1, a, {b: null}]", [1, "a", {"b": None}]),
        ("9" * 400, "9" * 400),
    ],
)
def test_what_yaml_means(text: str, value: object) -> None:
    read = parse(text).value
    assert read == value
    assert type(read) is type(value)


def test_lines_of_keys() -> None:
    parsed = parse("a: 1\nb:\n  c: 2\n  d: {e: 3}\n")
    assert parsed.lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d.e": 4}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
AWKWARD = st.sampled_from(
    ["1e-3", "no", "null", "~", "", " a", "a: b", "#x", "- a", "\n", "<<", "="]
)
NAMES = TEXT | AWKWARD
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)
PATHS = st.none() | st.sampled_from(["text", "/a/b c", "s3://bucket/x", "../y: z", "~/#data"])
LABELS = st.dictionaries(
    st.sampled_from(["zone", "ray.io/market-type", "1"]),
    st.sampled_from(["spot", "!spot", "in(a, b)", "1e3", "no"]),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    micro_batch, whole = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    some = st.none() | st.integers(1, 10**6)
    length = draw(st.sampled_from(["steps", "epochs"]))
    low = draw(st.integers(1, min(8, whole)))
    high = draw(st.integers(low, 9))
    shares: Any = draw(st.sampled_from(["auto", "equal", "list"]))
    if shares == "list":
        first = draw(st.integers(0, whole))
        low, high, shares = 2, 2, (first, whole - first)
    return Job(
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)),
        task=draw(st.sampled_from(["gpt.py:Gpt", "/a b/gpt.py:A.B", "package.module:Gpt", Job])),
        settings=draw(st.dictionaries(NAMES, PLAIN, max_size=4)),
        seed=draw(st.integers(0, 2**63 - 1)),
        global_batch=micro_batch * whole,
        micro_batch=micro_batch,
        drop_last=draw(st.booleans()),
        fuse=draw(st.just("auto") | st.integers(1, 9)),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        clip_norm=draw(st.none() | st.floats(1e-300, 1e300)),
        data={"path": draw(PATHS), "shuffle": draw(st.booleans())},
        elastic={"min_workers": low, "max_workers": high, "shares": shares},
        sync=draw(st.sampled_from(["auto", {"period": 1}, {"topology": "ring", "codec": "none"}])),
        checkpoint={"path": draw(PATHS), "every_steps": draw(some)},
        evaluate={"every_steps": draw(some), "max_samples": draw(some)},
        resources={"worker": {"memory_bytes": draw(some), "labels": draw(LABELS)}},
        **{length: draw(st.integers(1, 10**9))},
    )


@given(jobs())
def test_a_written_job_reads_back_equal(job: Job) -> None:
    mapping = parse(dump_job(job)).value
    again = Job.model_validate(mapping)
    assert again == job.resolved()
    assert dump_job(again) == dump_job(job)


@given(PLAIN)
def test_written_yaml_reads_back_equal(value: object) -> None:
    read = parse(write(value)).value
    assert read == value
    assert repr(read) == repr(value)  # equal is not enough: 1 == 1.0 == True


@given(st.text(max_size=200) | st.text("a: [{}]&*!|>-?\"'\n\t#%@,~<", max_size=60))
def test_any_text_is_read_or_refused_as_ours(text: str) -> None:
    with contextlib.suppress(YamlRefusedError):
        parse(text)


def test_a_written_job_is_a_file_that_loads(job_file: Path) -> None:
    job = load_job(job_file, ["settings.rate=1e-3", "settings.word='1e-3'"])
    copy = job_file.with_name("copy.yaml")
    copy.write_text(dump_job(job), encoding="utf-8")
    assert load_job(copy) == job.resolved()
    assert load_job(copy).settings == {"rate": 0.001, "word": "1e-3"}


def test_a_task_in_the_place_of_a_job_file(tmp_path: Path) -> None:
    task = tmp_path / "line.py"
    task.write_text("class Line: ...")
    with pytest.raises(SpecError, match="is a Python file, not a job file") as caught:
        load_job(task)
    assert "`task: line.py:CLASS`" in caught.value.hint
    (tmp_path / "line.yaml").write_text("task: line.py:Line")
    with pytest.raises(SpecError, match="is a Python file") as caught:
        load_job(task)
    assert caught.value.hint == f"did you mean {tmp_path}/line.yaml?"


def test_a_project_that_has_moved_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("task: /nowhere/line.py:Line\nsteps: 1\n")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(SpecError, match=r"no file line\.py in /nowhere") as caught:
        load_job(tmp_path / "job.yaml")
    assert caught.value.hint.endswith(f"raycloud train JOB --resume --run-dir {tmp_path}")
