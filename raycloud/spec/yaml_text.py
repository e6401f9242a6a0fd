"""Job files as text: the plain part of YAML 1.2, read strictly, and written so that it reads back.

Anchors, aliases, tags and several documents are refused: a job file says what it means where it
says it, and no small file grows large when it is read. Plain words follow the core schema of YAML
1.2 (section 10.3): `1e-3` is a number, and `no`, `on` and `2026-01-01` are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml
import yaml.reader

from raycloud.spec.mistakes import shortened
from raycloud.spec.schema import plain_word

DEEPEST = 40  # levels of lists and sections
MOST_VALUES = 10_000  # names and values; read in less than a second

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class YamlRefusedError(ValueError):
    """The text is not a job file's kind of YAML, in this line, counted from 1.

    `field` and `value` are empty where it is about the text as a whole.
    """

    def __init__(
        self, problem: str, hint: str, line: int, *, field: str = "", value: object = None
    ) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.line = problem, hint, line
        self.field, self.value = field, value


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document of plain values, and the line of every key, counted from 1, by dotted name."""

    value: Any
    lines: dict[str, int]


def parse(text: str) -> Parsed:
    """Read one document; an empty one is `None`.

    Raises:
        YamlRefusedError: It is not YAML, or uses what a job file may not.
    """
    lines: dict[str, int] = {}
    try:
        if not is_unicode(text):
            raise _no_character(1)
        node = _Loader(text).get_single_node()
        return Parsed(None if node is None else _value(node, "", lines), lines)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"holds the character {chr(error.character)!r}, which YAML does not allow"
        raise YamlRefusedError(problem, "leave it out", line) from None
    except yaml.MarkedYAMLError as error:
        raise _refused(error) from None
    except OverflowError:  # PyYAML on an escape beyond U+10FFFF
        raise _no_character(1) from None


def write(value: Any) -> str:
    """YAML that `parse` reads back as an equal value; keys stay in their order."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, indent=2
    )
    return text


class _Loader(yaml.SafeLoader):
    """Composes nodes, refusing what is not plain as soon as it is met."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _no_place(f"alias *{event.anchor}", "write the value out again", line)
        if event.anchor:
            raise _no_place(f"anchor &{event.anchor}", "leave it out", line)
        if event.tag is not None:
            hint = "leave it out: text, numbers, lists and names with values will do"
            raise _no_place(f"tag {event.tag}", hint, line)
        self._depth += 1
        if self._depth > DEEPEST:
            raise YamlRefusedError(f"goes deeper than {DEEPEST} levels", "flatten it", line)
        self._values += 1
        if self._values > MOST_VALUES:
            hint = "a job file names its data, it does not hold them"
            raise YamlRefusedError(f"holds more than {MOST_VALUES} values", hint, line)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def is_unicode(text: str) -> bool:
    """Whether text can be written to a file: half of a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _no_character(line: int) -> YamlRefusedError:
    return YamlRefusedError("holds an escape that is no character", "write the character", line)


def _no_place(thing: str, hint: str, line: int) -> YamlRefusedError:
    problem = f"holds the {shortened(thing)}, which has no place in a job"
    return YamlRefusedError(problem, hint, line)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that would read back as something else; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        style = '"' if not isinstance(_scalar(data), str) or not data.isprintable() else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.text)


def _refused(error: yaml.MarkedYAMLError) -> YamlRefusedError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    if "single document" in (error.context or ""):
        return YamlRefusedError("holds more than one document", "leave out the second ---", line)
    hint = "a field is `name: value`; what belongs to a section is indented below it by spaces"
    return YamlRefusedError(f"is not YAML: {shortened(str(error.problem))}", hint, line)


def _value(node: yaml.Node, at: str, lines: dict[str, int]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        if not is_unicode(node.value):
            raise _no_character(node.start_mark.line + 1)
        return _scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(entry, f"{at}.{i}", lines) for i, entry in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = _value(key_node, at, {}), key_node.start_mark.line + 1
        if not isinstance(key, str):
            problem = f"holds the key {shortened(plain_word(key))}, which is not a name"
            raise YamlRefusedError(problem, "put it in quotes to make it one", line)
        name = f"{at}.{key}" if at else key
        value = _value(value_node, name, lines)
        if key in values:
            problem = f"is written twice, first in line {lines[name]}"
            raise YamlRefusedError(problem, "keep one of the two", line, field=name, value=value)
        lines[name] = line
        values[key] = value
    return values


def _scalar(text: str) -> str | int | float | bool | None:
    """What a word without quotes stands for.

    >>> [_scalar(word) for word in ("1e-3", "010", "no", "~", "true", "0x1F")]
    [0.001, 10, 'no', None, True, 31]
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
