"""Pydantic's findings in our words: field, value, what is wrong, and what would do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.spec.mistakes import NOT_SET, Mistake
from raycloud.spec.remedy import remedy
from raycloud.spec.schema import Node, accepts, fields_of, is_free, schema_of, walk

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

OURS = "raycloud"  # the type of findings that carry our own problem and hint


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


def mistakes_in(error: ValidationError, section: type[BaseModel]) -> list[Mistake]:
    """One mistake for each field that pydantic found fault with, in its order."""
    tree = schema_of(section)
    found: dict[str, Mistake] = {}
    for finding in error.errors(include_url=False):
        mistake = _mistake(finding, tree)
        found.setdefault(mistake.field, mistake)
    meant = {mistake.meant for mistake in found.values()}
    return [m for m in found.values() if not (m.value is NOT_SET and m.field in meant)]


def _mistake(finding: Mapping[str, Any], tree: Node) -> Mistake:
    location, value, context = finding["loc"], finding["input"], finding.get("ctx", {})
    names, node = _follow(location, tree)
    field = ".".join(names) or "job"
    if finding["type"] == OURS:
        below = context["below"]
        return Mistake(
            field=f"{field}.{below}" if below else field,
            value=context["value"][0] if below else value,
            problem=context["problem"],
            hint=context["hint"],
        )
    if finding["type"] == "missing":
        problem = "every job needs one"
        hint = f"write `{field}:` with {accepts(node)}"
        return Mistake(field=field, value=NOT_SET, problem=problem, hint=hint)
    if finding["type"] == "invalid_key" or location[-1:] == ("[key]",):
        problem = "stands there as a name, but is not text"
        return Mistake(field=field, value=value, problem=problem, hint="put it in quotes")
    if finding["type"] == "extra_forbidden":
        return _unknown(names, str(location[len(names)]), value, tree)
    return Mistake(
        field=field,
        value=value,
        problem=f"must be {accepts(node)}",
        hint=remedy(field, value, node),
    )


def _follow(location: Sequence[int | str], tree: Node) -> tuple[list[str], Node]:
    """The names along a location that are fields, and the node of the last of them."""
    names: list[str] = []
    node = tree
    for step in location:
        fields = fields_of(node)
        if step in fields:
            node = fields[str(step)]
        elif is_free(node) and isinstance(step, str):
            inner = node.get("additionalProperties")
            node = inner if isinstance(inner, dict) else {}
        else:
            break
        names.append(str(step))
    return names, node


def _unknown(names: list[str], key: str, value: object, tree: Node) -> Mistake:
    section = ".".join(names)
    field = f"{section}.{key}" if section else key
    known = dict(walk(tree))
    near = _nearest(section, key, known)
    if near:
        hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
        if near == ("settings",):
            hint = f"what the task itself takes stands under `settings`: `settings.{key}`"
    else:
        depth = len(names)
        siblings = [n for n in known if n.startswith(f"{section}." if section else "")]
        listed = ", ".join(n.split(".")[depth] for n in siblings if n.count(".") == depth)
        hint = f"the fields of {f'`{section}`' if section else 'a job'} are {listed}"
    return Mistake(
        field=field,
        value=value,
        problem="no such field",
        hint=hint,
        meant=near[0] if len(near) == 1 else "",
    )


def _nearest(section: str, key: str, known: Mapping[str, Node]) -> tuple[str, ...]:
    """Known fields that an unknown key may stand for: its name elsewhere, or a near one here."""
    word = key.lower().replace("-", "_")
    same = tuple(name for name in known if name.rpartition(".")[2] == word)
    if same:
        return same
    here = {n.rpartition(".")[2]: n for n in known if n.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(word, here, n=1):
        return (here[close[0]],)
    if word in _ELSEWHERE and _ELSEWHERE[word] in known:
        return (_ELSEWHERE[word],)
    anywhere = {n.rpartition(".")[2]: n for n in known}
    return tuple(anywhere[c] for c in difflib.get_close_matches(word, anywhere, n=1, cutoff=0.75))
