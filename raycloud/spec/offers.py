"""What a shell may offer behind `--set`: every field, with a value that it takes."""

from __future__ import annotations

from collections.abc import Iterator

from raycloud.spec.job import Job
from raycloud.spec.schema import Node, choices, fields_of, is_free, plain_word, schema_of, takes

_FIRST = {"steps": "1000", "epochs": "1"}  # where null, the default, is of no use to the one typing


def offers() -> Iterator[tuple[str, str]]:
    """`field=value` and what the field means: one for each word it takes, else for its default."""
    yield from _below(schema_of(Job), "")


def _below(section: Node, prefix: str) -> Iterator[tuple[str, str]]:
    for name, node in fields_of(section).items():
        field, null = prefix + name, takes(node, "null")
        if fields_of(node) and not null:
            yield from _below(node, f"{field}.")
        elif not is_free(node) and not fields_of(node):
            meaning = node["description"].partition(". ")[0].rstrip(".")
            for word in _words(node) or [_FIRST.get(field, _default(node))]:
                yield f"{field}={word}", meaning


def _words(node: Node) -> list[str]:
    if takes(node, "boolean"):
        return ["true", "false"]
    return [plain_word(word) for word in node.get("x-there", choices(node))]


def _default(node: Node) -> str:
    return plain_word(node["default"]) if "default" in node else ""
