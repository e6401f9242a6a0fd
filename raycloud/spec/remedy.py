"""What would do instead of a value that a field does not take."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

from raycloud.spec.schema import Node, choices, fields_of, is_free, plain_word, takes

_YES = {"yes", "y", "on", "true", "1"}
_NO = {"no", "n", "off", "false", "0"}


def remedy(field: str, value: object, node: Node) -> str:
    """The first suggestion that fits, else what the field means and its default.

    >>> remedy("steps", "1_000", {"type": "integer", "minimum": 1})
    'write 1000'
    """
    for suggest in _SUGGESTIONS:
        text = suggest(field, value, node)
        if text:
            return text
    meaning = node.get("description", "").partition(". ")[0].rstrip(".")
    default = f"left out, it is {plain_word(node['default'])}" if "default" in node else ""
    return "; ".join(part for part in (meaning, default) if part)


def _section(field: str, value: object, node: Node) -> str:
    if is_free(node):
        return f"write lines of `name: value` indented below `{field}`"
    if not fields_of(node):
        return ""
    below = f"write the fields of `{field}` indented below it: {', '.join(fields_of(node))}"
    return f"leave it out, or {below}" if value is None else below


def _word(_field: str, value: object, node: Node) -> str:
    there = node.get("x-there")  # of all that the field will take, what this version does
    words = choices(node) if there is None else [word for word in there if isinstance(word, str)]
    if isinstance(value, str) and (near := difflib.get_close_matches(value.lower(), words, n=1)):
        return f"did you mean {near[0]}?"
    return "" if there is None else f"write {' or '.join(plain_word(word) for word in there)}"


def _boolean(_field: str, value: object, node: Node) -> str:
    word = str(value).lower()
    if not takes(node, "boolean") or word not in _YES | _NO:
        return ""
    return "write true" if word in _YES else "write false"


def _quoted(_field: str, value: object, node: Node) -> str:
    if not takes(node, "string") or choices(node) or not isinstance(value, int | float):
        return ""
    return f"put it in quotes: '{plain_word(value)}'"


def _number(_field: str, value: object, node: Node) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return ""
    options = [option for option in (node, *node.get("anyOf", ())) if "type" in option]
    fits = (_nearest(number, option) for option in options) if math.isfinite(number) else ()
    text = next((text for text in fits if text), "")
    return f"write {text}, without quotes" if text and text == value else text and f"write {text}"


def _nearest(number: float, node: Node) -> str:
    """The number nearest to a finite one that a node takes, if it is one for numbers."""
    if node["type"] == "number" and number > node.get("exclusiveMinimum", -math.inf):
        return f"{number:g}"
    if node["type"] != "integer":
        return ""
    if "const" in node:
        return str(node["const"])
    whole = math.ceil(number)
    if whole < node.get("minimum", whole):
        return f"{node['minimum']} or more"
    if whole > node.get("maximum", whole):
        return f"{node['maximum']} or less"
    return str(whole)


_SUGGESTIONS: tuple[Callable[[str, object, Node], str], ...] = (
    _section,
    _word,
    _boolean,
    _quoted,
    _number,
)
