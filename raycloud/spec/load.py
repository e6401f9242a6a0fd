"""Jobs from files and mappings, and back."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from raycloud.bounded import expanded
from raycloud.errors import SpecError
from raycloud.spec.job import Job
from raycloud.spec.mistakes import Mistake, Where, combined, refusal
from raycloud.spec.secrets import kept, literal
from raycloud.spec.task_reference import TaskReference
from raycloud.spec.yaml_text import Parsed, YamlRefusedError, parse, write

LARGEST_FILE_BYTES = 2**18

_FILE = "job file"  # stands where a field would, in errors about the file itself
_SET = "--set"
_EXAMPLE = "--set elastic.max_workers=4"


def load_job(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> Job:
    """Read a job file.

    Args:
        path: The YAML file. A relative task file starts at its directory.
        overrides: `a.b=c` each, as after `--set`: a field and its new value in YAML; the last wins.
        check_files: Whether the task's file must exist.

    Raises:
        SpecError: The file cannot be read or is not a job. Every mistake is in the one error.
    """
    path = Path(path)
    parsed = _parsed(path)
    if not isinstance(parsed.value, dict):
        raise _not_fields(path, parsed.value)
    values, places = _overridden(parsed.value, overrides)

    def where(field: str) -> str:
        while field:
            if field in places:
                return _SET
            if field in parsed.lines:
                return f"{path.name}:{parsed.lines[field]}"
            field = field.rpartition(".")[0]
        return path.name

    return _job(values, where=where, directory=path.parent, check_files=check_files)


def job_from_mapping(
    mapping: Mapping[str, Any],
    *,
    source: str = "",
    directory: Path | None = None,
    check_files: bool = True,
) -> Job:
    """Build a job from nested values, as a job file holds them.

    Args:
        mapping: Field to value; sections are mappings.
        source: Where it comes from, for errors.
        directory: Where a relative task file starts; `None`: the current directory.
        check_files: Whether the task's file must exist.

    Raises:
        SpecError: It is not a job. Every mistake is in the one error.
    """
    return _job(mapping, where=lambda _: source, directory=directory, check_files=check_files)


def dump_job(job: Job) -> str:
    """The resolved job as YAML, every field written out, its secrets left out.

    It reads back as `kept(job.resolved())`.
    """
    return write(kept_values(job))


def kept_values(job: Job) -> dict[str, Any]:
    """`kept(job.resolved())` as plain nested values, as a job file and JSON hold them."""
    values = kept(job.resolved()).model_dump()
    shares = values["elastic"]["shares"]
    values["elastic"]["shares"] = list(shares) if isinstance(shares, tuple) else shares
    return values


def written_secrets(path: Path) -> Iterator[tuple[str, str]]:
    """The fields of a job file that hold a secret themselves, each with what is kept of it.

    Raises:
        SpecError: The file cannot be read.
    """
    value = _parsed(path).value
    yield from literal(value if isinstance(value, dict) else {})


def overriding_secrets(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """As `written_secrets`, of the texts after `--set`, each on its own: another may hide it.

    Raises:
        SpecError: One is no override.
    """
    for override in overrides:
        yield from literal(_overridden({}, [override])[0])


def _job(
    values: Mapping[str, Any], *, where: Where, directory: Path | None, check_files: bool
) -> Job:
    job = Job.model_validate(values, context=where)
    if isinstance(job.task, type):
        return job
    reference = TaskReference.parse(job.task)
    if reference.file is None:
        return job
    file = expanded(reference.file)
    file = (Path.cwd() if directory is None else directory.absolute()) / file
    if check_files and not _is_file(file):
        raise refusal([_no_task_file(job.task, file, directory)], where)
    return job.model_copy(update={"task": f"{file}:{reference.qualname}"})


def _no_task_file(task: str, file: Path, directory: Path | None) -> Mistake:
    hint = "a relative file starts at the directory of the job file"
    if directory is not None and (directory / "events.jsonl").is_file():
        hint = "if the project has moved, name its job file: "
        hint += f"raycloud train JOB --resume --run-dir {shlex.quote(str(directory))}"
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], n=1)
    qualname = task.rpartition(":")[2]
    return Mistake(
        field="task",
        value=task,
        problem=f"no file {file.name} in {file.parent}",
        hint=f"did you mean {near[0]}:{qualname}?" if near else hint,
    )


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name too long, a directory that may not be searched
        return False


def _text(path: Path) -> str:
    def refused(problem: str, hint: str) -> SpecError:
        return refusal([Mistake(field=_FILE, value=str(path), problem=problem, hint=hint)])

    if path.suffix == ".py":
        beside = path.with_suffix(".yaml")
        raise refused(
            "is a Python file, not a job file",
            f"did you mean {beside}?"
            if beside.is_file()
            else f"write a job file in YAML, with `task: {path.name}:CLASS` and `steps: 1000`",
        )
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        siblings = [*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]
        near = difflib.get_close_matches(path.name, [p.name for p in siblings], n=1)
        hint = (
            f"did you mean {path.with_name(near[0])}?" if near else "write the path of a job file"
        )
        raise refused("no such file", hint) from None
    except IsADirectoryError:
        raise refused("is a directory", "write the path of a job file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refused(f"cannot be read: {reason}", "write the path of a readable file") from None
    if len(raw) > LARGEST_FILE_BYTES:
        limit = f"is larger than {LARGEST_FILE_BYTES} bytes"
        raise refused(limit, "a job file names its data, it does not hold them")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(f"byte {error.start} is not UTF-8 text", "save it as UTF-8") from None


def _parsed(path: Path) -> Parsed:
    try:
        return parse(_text(path))
    except YamlRefusedError as error:
        mistake = Mistake(
            field=error.field or _FILE,
            value=error.value if error.field else str(path),
            problem=error.problem,
            hint=error.hint,
        )
        place = f"{path.name}:{error.line}"
        raise refusal([mistake], lambda _: place) from None


def _not_fields(path: Path, value: object) -> SpecError:
    hint = "a job file is lines of `name: value`, at least `task: gpt.py:Gpt` and `steps: 1000`"
    if value is None:
        return refusal([Mistake(field=_FILE, value=str(path), problem="is empty", hint=hint)])
    problem = f"is one {'list' if isinstance(value, list) else 'value'}, not fields with values"
    return refusal([Mistake(field=_FILE, value=str(path), problem=problem, hint=hint)])


def _overridden(
    values: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], set[str]]:
    """The values with every override put in, and the dotted names of those put in."""
    result = deepcopy(dict(values))
    places: set[str] = set()
    errors: list[SpecError] = []
    for override in overrides:
        field, equals, text = override.partition("=")
        field = field.strip()
        try:
            if not equals or not all(field.split(".")):
                raise _no_override(_SET, override, "is not field=value", f"write as in {_EXAMPLE}")
            _put(result, field, _new_value(field, text))
        except SpecError as error:
            errors.append(error)
        places.add(field)
    if errors:
        raise combined(errors)
    return result, places


def _no_override(field: str, value: object, problem: str, hint: str) -> SpecError:
    mistake = Mistake(field=field, value=value, problem=problem, hint=hint)
    return refusal([mistake], lambda field: "" if field == _SET else _SET)


def _new_value(field: str, text: str) -> Any:
    try:
        value = parse(text).value
    except YamlRefusedError as error:
        raise _no_override(field, text, error.problem, error.hint) from None
    if value is None and text.lstrip().startswith("#"):
        raise _no_override(field, text, "is a comment in YAML", f"write --set '{field}=\"{text}\"'")
    if isinstance(value, dict):
        hint = f"set its fields one by one, as in --set {field}.{next(iter(value), 'name')}=…"
        raise _no_override(field, text, "is a whole section", hint)
    return value


def _put(values: dict[str, Any], field: str, value: Any) -> None:
    *sections, name = field.split(".")
    for depth, section in enumerate(sections, start=1):
        inner = values.get(section)
        if inner is None or inner == "auto":  # a section that is left to its defaults
            inner = {}
        if not isinstance(inner, dict):
            above = ".".join(sections[:depth])
            hint = f"leave out `{above}`, or set it as a whole"
            raise _no_override(field, value, f"{above} is {inner!r}, not a section", hint)
        values[section] = inner
        values = inner
    values[name] = value
