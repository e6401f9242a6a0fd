"""Job files: loaded with overrides, and written back, whole or as what is not at its default.

Every text written is a job file again, and reads back as the same job, but for a secret that it
holds itself: that is left out, as in a run directory.
"""

from __future__ import annotations

import difflib
import os.path
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import expanded, read_whole
from raycloud.errors import SpecError
from raycloud.spec.job import Job, TaskReference
from raycloud.spec.mistakes import combined, mistake
from raycloud.spec.schema import Node, accepts, fields_of, plain_word, schema_of, takes
from raycloud.spec.secrets import kept, literal
from raycloud.spec.sections import written_out
from raycloud.spec.yaml_text import Parsed, YamlRefusedError, parse, write

if TYPE_CHECKING:
    from raycloud.events import SyncPoint

LARGEST_FILE_BYTES = 2**18

_FILE = "job file"  # stands where a field would, in errors about the file itself
_SET = "--set"
_BESIDE = ("sweep",)  # sections of a job file that are not of the job
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
    for section in _BESIDE:
        values.pop(section, None)

    def where(field: str) -> str:
        while field:
            if field in places:
                return _SET
            if field in parsed.lines:
                return f"{path.name}:{parsed.lines[field]}"
            field = field.rpartition(".")[0]
        return path.name

    job = Job.model_validate(values, context=where)
    reference = TaskReference.parse(str(job.task))
    if reference.file is None:
        return job
    file = path.parent.absolute() / expanded(reference.file)
    if check_files and not os.path.isfile(file):  # noqa: PTH113 - `Path.is_file` raises of some names
        raise _no_task_file(str(job.task), file, path.parent, where("task"))
    return job.model_copy(update={"task": f"{file}:{reference.qualname}"})


def read_section(path: Path, name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A section that a job file has beside the job.

    Raises:
        SpecError: The file cannot be read, or has none.
    """
    found = _parsed(path).value
    values = found.get(name) if isinstance(found, dict) else None
    if not isinstance(values, dict):
        hint = f"write it, with `space:` and the fields to vary, or use `raycloud train {path}`"
        raise mistake(_FILE, str(path), f"has no section {name}", hint)
    return _overridden(values, overrides)[0]


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with other values of these fields, by dotted name.

    Raises:
        SpecError: There is no such field, or it does not take the value.
    """
    tree = job.model_dump()
    for field, value in values.items():
        _put(tree, field, value)
    return Job.model_validate(tree)


def option_text(option: str, path: Path, hint: str) -> str:
    """The text of a file that an option names.

    Raises:
        SpecError: It cannot be read; with this hint.
    """
    try:
        return read_whole(path).decode()
    except (OSError, ValueError) as error:
        raise SpecError(option, str(path), f"cannot be read: {error}", hint=hint) from error


def point_of(job: Job, told: Mapping[str, Any]) -> SyncPoint:
    """The point by which updates of a run of this job may travel, by fields of `sync`.

    What these leave out is the default, with the topology that the codec needs.

    Raises:
        SpecError: The job could not have asked for it, or its updates cannot change their way.

    >>> job = Job(task="a:B", steps=1)
    >>> print(point_of(job, {"codec": "int4", "period": 8}))
    tree, codec int4, period 8
    """
    if job.served:
        raise SpecError(
            "sync.topology",
            "servers",
            "is not changed while a run goes on",
            hint="start a run whose sync.topology is another",
        )
    if job.sync.stream > 1:
        raise SpecError(
            "sync.stream",
            job.sync.stream,
            "is not changed while a run goes on, nor is what goes with it",
            hint="start a run without sync.stream",
        )
    default = {"codec": "none", "topology": "auto", "period": 1, "ratio": None}
    asked = {**default, **told, "staleness": 0, "tour": None, "warm_steps": 0}
    return with_values(job, {f"sync.{name}": value for name, value in asked.items()}).sync_point


def dump_job(job: Job) -> str:
    """The resolved job as YAML, every field written out, its secrets left out.

    It reads back as `kept(job.resolved())`.
    """
    return write(kept_values(job))


def dump_commented(job: Job) -> str:
    """Every field, each below what it means and takes."""
    return "\n".join(_explained(schema_of(Job), kept_values(job), indent="")) + "\n"


def differences(job: Job) -> dict[str, tuple[Any, Any]]:
    """Fields that are not at their default, by dotted name: what they are, and their default.

    `task` is among them, since it has none, as are all entries of `settings`.
    """
    return {".".join(path): pair for path, pair in _changed(job).items()}


def dump_minimal(job: Job) -> str:
    """What is not at its default, as a job file; each line names the default it departs from."""
    tree: dict[str, Any] = {}
    for path, (value, default) in _changed(job).items():
        *sections, name = path
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        known = path[0] not in {"task", "settings"}
        inner[name] = (value, f"default: {plain_word(default)}" if known else "")
    return "\n".join(_noted(tree, indent="")) + "\n"


def kept_values(job: Job) -> dict[str, Any]:
    """`kept(job.resolved())` as plain nested values, as a job file and JSON hold them."""
    return kept(job.resolved()).model_dump(mode="json")


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


def _no_task_file(task: str, file: Path, directory: Path, place: str) -> SpecError:
    hint = "a relative file starts at the directory of the job file"
    if (directory / "events.jsonl").is_file():
        hint = "if the project has moved, name its job file: "
        hint += f"raycloud train JOB --resume --run-dir {shlex.quote(str(directory))}"
    near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], n=1)
    hint = f"did you mean {near[0]}:{task.rpartition(':')[2]}?" if near else hint
    return mistake("task", task, f"no file {file.name} in {file.parent}", hint, place=place)


def _text(path: Path) -> str:
    refuse = partial(mistake, _FILE, str(path))
    if path.suffix == ".py":
        beside = path.with_suffix(".yaml")
        hint = f"write a job file in YAML, with `task: {path.name}:CLASS` and `steps: 1000`"
        hint = f"did you mean {beside}?" if beside.is_file() else hint
        raise refuse("is a Python file, not a job file", hint)
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        siblings = [p.name for suffix in ("yaml", "yml") for p in path.parent.glob(f"*.{suffix}")]
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else ""
        raise refuse("no such file", hint or "write the path of a job file") from None
    except IsADirectoryError:
        raise refuse("is a directory", "write the path of a job file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse(f"cannot be read: {reason}", "write the path of a readable file") from None
    if len(raw) > LARGEST_FILE_BYTES:
        hint = "a job file names its data, it does not hold them"
        raise refuse(f"is larger than {LARGEST_FILE_BYTES} bytes", hint)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"byte {error.start} is not UTF-8 text", "save it as UTF-8") from None


def _parsed(path: Path) -> Parsed:
    try:
        return parse(_text(path))
    except YamlRefusedError as error:
        field, value = (error.field, error.value) if error.field else (_FILE, str(path))
        place = f"{path.name}:{error.line}"
        raise mistake(field, value, error.problem, error.hint, place=place) from None


def _not_fields(path: Path, value: object) -> SpecError:
    hint = "a job file is lines of `name: value`, at least `task: gpt.py:Gpt` and `steps: 1000`"
    kind = "list" if isinstance(value, list) else "value"
    problem = "is empty" if value is None else f"is one {kind}, not fields with values"
    return mistake(_FILE, str(path), problem, hint)


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
                raise mistake(_SET, override, "is not field=value", f"write as in {_EXAMPLE}")
            _put(result, field, _new_value(field, text))
        except SpecError as error:
            errors.append(error)
        places.add(field)
    if errors:
        raise combined(errors)
    return result, places


def _new_value(field: str, text: str) -> Any:
    refuse = partial(mistake, field, text, place=_SET)
    try:
        value = parse(text).value
    except YamlRefusedError as error:
        raise refuse(error.problem, error.hint) from None
    if value is None and text.lstrip().startswith("#"):
        raise refuse("is a comment in YAML", f"write --set '{field}=\"{text}\"'")
    if isinstance(value, dict):
        hint = f"set its fields one by one, as in --set {field}.{next(iter(value), 'name')}=…"
        raise refuse("is a whole section", hint)
    return value


def _put(values: dict[str, Any], field: str, value: Any) -> None:
    *sections, name = field.split(".")
    for depth, section in enumerate(sections, start=1):
        inner = values.get(section)
        if inner is None:  # a section that is left to its defaults
            inner = {}
        inner = written_out(section, inner)
        if not isinstance(inner, dict):
            above = ".".join(sections[:depth])
            hint = f"leave out `{above}`, or set it as a whole"
            problem = f"{above} is {inner!r}, not a section"
            raise mistake(field, value, problem, hint, place=_SET)
        values[section] = inner
        values = inner
    values[name] = value


def _changed(job: Job) -> dict[tuple[str, ...], tuple[Any, Any]]:
    usual = Job(task=job.task, steps=1).resolved().model_copy(update={"steps": None})
    here, there = dict(_leaves(kept_values(job))), dict(_leaves(kept_values(usual)))
    changed = {p: (v, there.get(p)) for p, v in here.items() if p not in there or v != there[p]}
    return {("task",): (here["task",], None), **changed}


def _explained(section: Node, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, node in fields_of(section).items():
        whole = bool(fields_of(node)) and not takes(node, "null")
        said = node["description"] + ("" if whole else f" Takes {accepts(node)}.")
        for line in textwrap.wrap(said, 100 - len(indent) - 2):
            yield f"{indent}# {line}"
        if whole:
            yield f"{indent}{name}:"
            yield from _explained(node, values[name], f"{indent}  ")
        else:
            yield textwrap.indent(write({name: values[name]}).rstrip("\n"), indent)


def _leaves(
    values: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field below, by its path; an entry of `settings` is one, whatever it holds."""
    for name, value in values.items():
        if isinstance(value, dict) and value and at != ("settings",) and name != "labels":
            yield from _leaves(value, (*at, name))
        else:
            yield (*at, name), value


def _noted(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, entry in tree.items():
        if isinstance(entry, dict):
            yield f"{indent}{name}:"
            yield from _noted(entry, f"{indent}  ")
            continue
        value, note = entry
        first, *rest = write({name: value}).rstrip("\n").split("\n")
        yield f"{indent}{first}" + (f"  # {note}" if note else "")
        yield from (indent + line for line in rest)
