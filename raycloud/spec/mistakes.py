"""Mistakes in a job: field, value, problem and remedy; all of them in one error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.errors import SpecError
from raycloud.spec.schema import (
    Node,
    accepts,
    fields_of,
    is_free,
    meaning,
    offered,
    plain_word,
    schema_of,
    takes,
    walk,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Where = Callable[[str], str]  # dotted field -> the place it was written, e.g. `gpt.yaml:12`, or ""

OURS = "raycloud"  # the type of pydantic's findings that carry our own problem and hint
_LONGEST = 80  # characters of a name or value that a message repeats
_MOST_LISTED = 20  # mistakes that one message lists

# What other trainers call it.
_ELSEWHERE = {
    "batch_size": "global_batch",
    "train_batch_size": "global_batch",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_workers": "elastic.max_workers",
    "workers": "elastic.max_workers",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "dataset": "data.path",
    "model": "task",
    "lr": "settings",
    "learning_rate": "settings",
    "num_gpus": "resources.worker.gpus",
}


class _Shown(str):
    """Text that stands for a value in a message as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The text itself."""
        return str(self)


NOT_SET = _Shown("(not set)")  # the value of a field that nobody wrote


def shortened(text: str) -> str:
    """Text short enough for a message: what is too long is cut in the middle."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}…{text[-19:]}"


def mistake(field: str, value: object, problem: str, hint: str, place: str = "") -> SpecError:
    """One thing that is wrong, and where it was written; what is long is cut in the middle.

    `field` is dotted; `value` is what was written there, or `NOT_SET`; `hint` is what would do.
    """
    problem = f"{problem} ({place})" if place else problem
    return SpecError(shortened(field), _Shown(shortened(repr(value))), problem, hint=hint)


class SpecErrors(SpecError):
    """Several fields of the job are wrong: the first is in `field`, `value` and `problem`.

    Attributes:
        message: Every mistake, each with its remedy; `hint` is empty.
        all: Each mistake as an error of its own, in the order of the message.
    """

    def __init__(self, errors: Sequence[SpecError]) -> None:
        """Compose one message that lists every mistake with its remedy."""
        first = errors[0]
        super().__init__(first.field, _Shown(first.value), first.problem)
        self.all: tuple[SpecError, ...] = tuple(errors)
        lines = [f"{len(errors)} mistakes in the job:"]
        for error in errors[:_MOST_LISTED]:
            lines.append(f"  - {error.message}")
            lines += [f"    hint: {error.hint}"] if error.hint else []
        if len(errors) > _MOST_LISTED:
            lines.append(f"  and {len(errors) - _MOST_LISTED} more")
        self.message = "\n".join(lines)


def combined(errors: Sequence[SpecError]) -> SpecError:
    """The one error to raise for these errors, at least one."""
    return errors[0] if len(errors) == 1 else SpecErrors(errors)


def mistakes_in(
    error: ValidationError, section: type[BaseModel], where: Where = lambda _: ""
) -> tuple[list[SpecError], set[str]]:
    """A mistake for each field that pydantic found fault with, and all fields that are at fault.

    A field that is missing because it was written under another name is no mistake of its own.
    """
    tree = schema_of(section)
    found: dict[str, tuple[object, str, str]] = {}
    meant: set[str] = set()
    for finding in error.errors(include_url=False):
        field, value, problem, hint, near = _told(finding, tree)
        if field not in found:
            found[field] = value, problem, hint
            meant.add(near)
    mistakes = [
        mistake(field, *told, where(field))
        for field, told in found.items()
        if not (told[0] is NOT_SET and field in meant)
    ]
    return mistakes, {*found, *meant} - {""}


def _told(finding: Mapping[str, Any], tree: Node) -> tuple[str, object, str, str, str]:
    """Field, value, problem and hint; and the known field that an unknown one may stand for."""
    location, value, context = finding["loc"], finding["input"], finding.get("ctx", {})
    names, node = _follow(location, tree)
    field = ".".join(names) or "job"
    match finding["type"]:
        case ours if ours == OURS:
            if context["below"]:
                field, value = f"{field}.{context['below']}", context["value"][0]
            return field, value, context["problem"], context["hint"], ""
        case "missing":
            hint = f"write `{field}:` with {accepts(node)}"
            return field, NOT_SET, "is required", hint, ""
        case "extra_forbidden":
            key = str(location[-1])
            hint, meant = _unknown(".".join(names), key, tree, node)
            return ".".join([*names, key]), value, "no such field", hint, meant
        case kind if kind == "invalid_key" or location[-1:] == ("[key]",):
            return field, value, "stands there as a name, but is not text", "put it in quotes", ""
        case _:
            return field, value, f"must be {accepts(node)}", _remedy(field, value, node), ""


def _follow(location: Sequence[int | str], tree: Node) -> tuple[list[str], Node]:
    """The names along a location that are fields, and the node of the last of them."""
    names: list[str] = []
    node = tree
    for step in location:
        if step in (fields := fields_of(node)):
            names.append(str(step))
            node = fields[str(step)]
        elif is_free(node) and isinstance(step, str):
            names.append(step)
            inner = node.get("additionalProperties")
            node = inner if isinstance(inner, dict) else {}
        elif isinstance(step, int) and fields_of(node.get("items", {})):  # of a list of sections
            names[-1] += f"[{step}]"
            node = node["items"]
        else:
            break
    return names, node


def _remedy(field: str, value: object, node: Node) -> str:
    """What would do: a word that is near, the fields of a section, else the field's meaning."""
    words = offered(node)
    if isinstance(value, str) and (near := difflib.get_close_matches(value.lower(), words, n=1)):
        return f"did you mean {near[0]}?"
    if is_free(node):
        return f"write lines of `name: value` indented below `{field}`"
    if fields_of(node):
        return f"write the fields of `{field}` indented below it: {', '.join(fields_of(node))}"
    if takes(node, "string") and not words and isinstance(value, int | float):
        return f"put it in quotes: '{plain_word(value)}'"
    default = f"left out, it is {plain_word(node['default'])}" if "default" in node else ""
    return "; ".join(part for part in (meaning(node), default) if part) or f"write {accepts(node)}"


def _unknown(section: str, key: str, tree: Node, node: Node) -> tuple[str, str]:
    """What an unknown field may stand for: the remedy, and the known field if there is one."""
    near = _nearest(section, key, tree, node)
    if near == ["settings"]:
        return f"what the task itself takes stands under `settings`: `settings.{key}`", "settings"
    if near:
        hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
        return hint, near[0] if len(near) == 1 else ""
    what = f"`{section}`" if section else "a job"
    return f"the fields of {what} are {', '.join(fields_of(node))}", ""


def _nearest(section: str, key: str, tree: Node, node: Node) -> list[str]:
    """Known fields that an unknown key may stand for: its name elsewhere, or a near one here."""
    word = key.lower().replace("-", "_")
    known = [name for name, _ in walk(tree)]
    if same := [name for name in known if name.rpartition(".")[2] == word]:
        return same
    if close := difflib.get_close_matches(word, fields_of(node), n=1):
        return [f"{section}.{close[0]}" if section else close[0]]
    if _ELSEWHERE.get(word) in known:
        return [_ELSEWHERE[word]]
    anywhere = {name.rpartition(".")[2]: name for name in known}
    return [anywhere[c] for c in difflib.get_close_matches(word, anywhere, n=1, cutoff=0.75)]
