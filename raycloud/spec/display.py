"""A job as people look at it: all of it, all of it explained, or what is not at its default.

Every text is a job file again, and reads back as the same job, but for a secret that it holds
itself: that is left out, as in a run directory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from raycloud.spec.job import Job
from raycloud.spec.load import kept_values
from raycloud.spec.schema import Node, accepts, fields_of, plain_word, schema_of, takes
from raycloud.spec.yaml_text import write

_WIDTH = 100


def values_of(job: Job) -> dict[str, Any]:
    """The resolved job as plain nested values, without secrets."""
    return kept_values(job)


def plain(job: Job) -> str:
    """Every field, one a line."""
    return write(values_of(job))


def commented(job: Job) -> str:
    """Every field, each below what it means and takes."""
    return "\n".join(_explained(schema_of(Job), values_of(job), indent="")) + "\n"


def differences(job: Job) -> dict[str, tuple[Any, Any]]:
    """Fields that are not at their default, by dotted name: what they are, and their default.

    `task` is among them, since it has none, as are all entries of `settings`.
    """
    return {".".join(path): pair for path, pair in _changed(job).items()}


def minimal(job: Job) -> str:
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


def _changed(job: Job) -> dict[tuple[str, ...], tuple[Any, Any]]:
    usual = Job(task=job.task, steps=1).resolved().model_copy(update={"steps": None})
    here, there = dict(_leaves(values_of(job))), dict(_leaves(values_of(usual)))
    changed = {p: (v, there.get(p)) for p, v in here.items() if p not in there or v != there[p]}
    return {("task",): (here["task",], None), **changed}


def _explained(section: Node, values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, node in fields_of(section).items():
        whole = bool(fields_of(node)) and not takes(node, "null")
        said = node["description"] + ("" if whole else f" Takes {accepts(node)}.")
        for line in textwrap.wrap(said, _WIDTH - len(indent) - 2):
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
