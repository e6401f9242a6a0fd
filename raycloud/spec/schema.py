"""JSON schema of the job as a tree of fields: what a field accepts, in words and for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

Node = Mapping[str, Any]

_ARTICLES = {"integer": "an integer", "number": "a number", "string": "text"}
_USEFUL = {"steps": "1000", "epochs": "1"}  # to offer where the default is null


@cache
def schema_of(section: type[BaseModel]) -> Node:
    """The JSON schema of a section, every reference replaced by what it refers to."""
    raw = section.model_json_schema()
    definitions = raw.pop("$defs", {})
    inlined: Node = _inline(raw, definitions)
    return inlined


def _inline(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inline(entry, definitions) for entry in value]
    if not isinstance(value, dict):
        return value
    rest = {key: _inline(entry, definitions) for key, entry in value.items() if key != "$ref"}
    if isinstance(said := value.get("description"), str):
        rest["description"] = " ".join(said.split())  # it stands over several lines there
    if "$ref" not in value:
        return rest
    target = _inline(definitions[value["$ref"].removeprefix("#/$defs/")], definitions)
    return {**target, **rest}


def render_schema(job: type[BaseModel]) -> str:
    """The JSON schema of a job file as a file, which editors read."""

    def untitled(value: Any) -> Any:  # titles only repeat the names of fields
        if isinstance(value, list):
            return [untitled(entry) for entry in value]
        if isinstance(value, dict):
            return {k: untitled(v) for k, v in value.items() if k != "title"}
        return value

    draft = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": draft, "title": "raycloud job file", **untitled(schema_of(job))}
    return json.dumps(schema, indent=2) + "\n"


def fields_of(node: Node) -> Mapping[str, Node]:
    """The fields of a section by name; empty if the node is not a section."""
    for option in (node, *node.get("anyOf", ())):
        if "properties" in option:
            properties: Mapping[str, Node] = option["properties"]
            return properties
    return {}


def is_free(node: Node) -> bool:
    """Whether the node takes names of the user's own, like `settings` and `labels`."""
    return node.get("type") == "object" and "properties" not in node


def walk(node: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every field below a section with its dotted name, sections before what they hold.

    A section that may be null is not entered.
    """
    for name, field in fields_of(node).items():
        yield prefix + name, field
        if not takes(field, "null"):
            yield from walk(field, f"{prefix}{name}.")


def settable(section: Node) -> Iterator[tuple[str, str]]:
    """`field=value` and the field's meaning, for a shell to complete `--set`.

    One for each word that a field takes, else one for its default.
    """
    for field, node in walk(section):
        if not fields_of(node) and not is_free(node):
            default = _USEFUL.get(field, plain_word(node["default"]) if "default" in node else "")
            for word in ["true", "false"] if takes(node, "boolean") else offered(node) or [default]:
                yield f"{field}={word}", meaning(node)


def meaning(node: Node) -> str:
    """What a field means, in one sentence without its full stop."""
    first: str = node.get("description", "").partition(". ")[0]
    return first.rstrip(".")


def choices(node: Node) -> tuple[str, ...]:
    """The words a field takes by name, e.g. ring and auto."""
    if "anyOf" in node:
        return tuple(word for option in node["anyOf"] for word in choices(option))
    words = node.get("enum", [node["const"]] if "const" in node else [])
    return tuple(word for word in words if isinstance(word, str))


def offered(node: Node) -> list[str]:
    """The words that a field takes, as one writes them."""
    return [plain_word(word) for word in choices(node)]


def takes(node: Node, kind: str) -> bool:
    """Whether a field takes values of a JSON type."""
    return node.get("type") == kind or any(takes(option, kind) for option in node.get("anyOf", ()))


def plain_word(value: object) -> str:
    """A value as it stands in a job file.

    >>> plain_word(None), plain_word(True), plain_word("auto"), plain_word(2)
    ('null', 'true', 'auto', '2')
    """
    return json.dumps(value) if not isinstance(value, str) else value


def accepts(node: Node) -> str:
    """What a field takes, in words.

    >>> accepts({"type": "integer", "minimum": 1})
    'an integer of at least 1'
    >>> accepts({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]})
    'a number above 0 or null'
    """
    options = list(dict.fromkeys(_options(node)))
    return ", ".join(options[:-1]) + " or " + options[-1] if len(options) > 1 else options[0]


def _options(node: Node) -> list[str]:
    if "x-accepts" in node:
        return [node["x-accepts"]]
    if "anyOf" in node:
        parts = [_options(option) for option in node["anyOf"]]
        # Names, then what is described, then null.
        parts.sort(key=lambda part: 2 if part == ["null"] else " " in part[0])
        return [option for part in parts for option in part]
    if "const" in node or "enum" in node:
        return [plain_word(word) for word in node.get("enum", [node.get("const")])]
    match node.get("type"):
        case "boolean":
            return ["true", "false"]
        case "array":
            return [f"a list, each entry {accepts(node['items'])}"]
        case "object":
            return ["names with values" if is_free(node) else "a section"]
        case kind:
            return [_ARTICLES.get(str(kind), str(kind)) + _bounds(node)]


def _bounds(node: Node) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    if "exclusiveMinimum" in node:
        return f" above {node['exclusiveMinimum']:g}"
    return ""
