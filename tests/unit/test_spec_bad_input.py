"""Every mistake in a job file is refused with its field, its value, its place and what would do."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.spec import SpecErrors, load_job
from raycloud.spec.yaml_text import DEEPEST, MOST_VALUES

GOOD = "task: gpt.py:Gpt\nsteps: 10\n"  # a whole job, when gpt.py is there
CASES = Path(__file__).parent / "bad_input"


def cases(name: str) -> Sequence[object]:
    """The cases of a file as (text, message, hint); its first lines say how they are written."""
    found = []
    for block in re.split(r"^# ", (CASES / name).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, *lines = block.rstrip("\n").splitlines()
        told: dict[str, list[str]] = {"+": [], "|": [], "=": [], "?": []}
        for line in lines:
            told[line[:1]].append(line[2:])
        text = "\n".join(told["+"] + told["|"])
        text = f"{GOOD}{text}\n" if told["+"] and name == "files.txt" else text
        found.append(pytest.param(text, *told["="], *told["?"], id=title))
    return found


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: in messages, long paths are shortened."""
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as folder:
        yield Path(folder)


def refusal(tmp_path: Path, text: str | bytes, *overrides: str) -> SpecError:
    """What loading this text beside an empty gpt.py raises."""
    (tmp_path / "gpt.py").touch()
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_job(path, overrides)
    assert caught.value.field
    return caught.value


def told(tmp_path: Path, text: str | bytes, *overrides: str) -> tuple[str, str]:
    """Message and hint of a refusal, with the directory of the job file as DIR."""
    error = refusal(tmp_path, text, *overrides)
    return error.message.replace(str(tmp_path), "DIR"), error.hint.replace(str(tmp_path), "DIR")


@pytest.mark.parametrize(("text", "message", "hint"), cases("files.txt"))
def test_mistake_in_a_file(tmp_path: Path, text: str, message: str, hint: str) -> None:
    assert told(tmp_path, text) == (message, hint)


@pytest.mark.parametrize(("override", "message", "hint"), cases("overrides.txt"))
def test_mistake_in_an_override(tmp_path: Path, override: str, message: str, hint: str) -> None:
    assert told(tmp_path, GOOD, override) == (message, hint)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        pytest.param(
            f"{GOOD}data:\n\tpath: x",
            r"is not YAML: found character '\t' that cannot start any token (job.yaml:4)",
            "a field is `name: value`; what belongs to a section is indented below it by spaces",
            id="tab",
        ),
        pytest.param(
            f"{GOOD}name: a\x07b",
            r"holds the character '\x07', which YAML does not allow (job.yaml:3)",
            "leave it out",
            id="control character",
        ),
        pytest.param(
            b"task: gpt.py:Gpt\nsteps: 10\nname: caf\xe9\n",
            "byte 36 is not UTF-8 text",
            "save it as UTF-8",
            id="not UTF-8",
        ),
        pytest.param(
            b"#" * (2**20 + 1),
            "is larger than 262144 bytes",
            "a job file names its data, it does not hold them",
            id="too large",
        ),
        pytest.param(
            f"settings: {'[' * 100_000}",
            f"goes deeper than {DEEPEST} levels (job.yaml:1)",
            "flatten it",
            id="too deep",
        ),
        pytest.param(
            f"settings: [{'1,' * 100_000}]",
            f"holds more than {MOST_VALUES} values (job.yaml:1)",
            "a job file names its data, it does not hold them",
            id="too many values",
        ),
    ],
)
def test_mistake_in_the_text(tmp_path: Path, text: str | bytes, problem: str, hint: str) -> None:
    assert told(tmp_path, text) == (f"job file = 'DIR/job.yaml': {problem}", hint)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").touch()
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "gtp.yaml")
    assert caught.value.message == f"job file = '{tmp_path}/gtp.yaml': no such file"
    assert caught.value.hint == f"did you mean {tmp_path}/gpt.yaml?"


def test_no_file_and_none_like_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "none" / "gpt.yaml")
    assert caught.value.hint == "write the path of a job file"


def test_directory_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path)
    assert caught.value.message == f"job file = '{tmp_path}': is a directory"
    assert caught.value.hint == "write the path of a job file in it"


@pytest.mark.parametrize("name", ["job\0.yaml", "j" * 300, "job.yaml/inner.yaml"])
def test_path_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").touch()
    with pytest.raises(SpecError, match="cannot be read: "):
        load_job(tmp_path / name)


def test_all_mistakes_come_in_one_error(tmp_path: Path) -> None:
    text = "task: gpt.py\nsteps: '7'\nelastic:\n  min_workers: 0\n  shares: [1]\nglobal_batch: 30\n"
    error = refusal(tmp_path, text, "sync.topology=star", "zebra.a=1")
    assert isinstance(error, SpecErrors)
    assert (error.field, error.value) == ("task", "'gpt.py'")
    assert [other.field for other in error.all[1:]] == [
        "steps",
        "elastic.min_workers",
        "sync.topology",
        "zebra",
        "global_batch",
    ]
    assert error.hint == ""
    lines = error.message.splitlines()
    assert lines[0] == "6 mistakes in the job:"
    assert lines[3] == "  - steps = '7': must be an integer of at least 1 or null (job.yaml:2)"
    assert lines[4].startswith("    hint: Updates of the model until the run ends; or give")
    assert lines[7].endswith("(--set)")
    assert lines[-1] == "    hint: write global_batch 28 or 32, or micro_batch 3"


def test_all_mistakes_of_overrides_come_in_one_error(tmp_path: Path) -> None:
    error = refusal(tmp_path, GOOD, "steps", "data=[1", "steps.x=1")
    assert isinstance(error, SpecErrors)
    assert [error.field, *(other.field for other in error.all[1:])] == ["--set", "data", "steps.x"]


def test_a_misspelt_field_is_not_missed_as_well(tmp_path: Path) -> None:
    error = refusal(
        tmp_path, "taks: gpt.py:Gpt\nepoch: 1\nelastic: {max_worker: 1, min_workers: 2}"
    )
    assert isinstance(error, SpecErrors)
    assert {error.field, *(e.field for e in error.all[1:])} == {
        "taks",
        "epoch",
        "elastic.max_worker",
    }


def test_a_great_many_mistakes_stay_readable(tmp_path: Path) -> None:
    error = refusal(tmp_path, GOOD + "".join(f"zebra{i}: 1\n" for i in range(500)))
    assert isinstance(error, SpecErrors)
    assert len(error.all[1:]) == 499
    assert error.message.endswith("\n  and 480 more")
    long = refusal(tmp_path, f"{GOOD}{'z' * 500}: {'x' * 500}")
    assert len(long.message) < 250


def test_the_table_is_as_long_as_promised() -> None:
    assert len(cases("files.txt")) + len(cases("overrides.txt")) >= 100
