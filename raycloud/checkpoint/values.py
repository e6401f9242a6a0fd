"""Plain Python state as JSON, back bit for bit.

None, bools, strings, integers, finite floats, lists, and dictionaries with string keys are
themselves in JSON. The rest is an object with one key that starts with `~`:

    {"~tuple": [...]}            a tuple
    {"~dict": [[key, value]]}    a dict with a key that is an integer or starts with `~`
    {"~counter": [[key, value]]} a collections.Counter
    {"~ordered": [[key, value]]} a collections.OrderedDict
    {"~float": "7ff0000000000000"}  infinities and NaN: the IEEE 754 bits, big-endian

and, from format 2 of a manifest on, what stands for something that is no plain value (`Tagged`):

    {"~tensor": name}, {"~array": name}, {"~scalar": name}  a tensor, a NumPy array or number, whose
                                 elements are among the tensors
    {"~object": {"kind": ..., "state": {...}}}  the state of an object that is there already
    {"~live": null}              what is there already, and has no state: a function, a class
    {"~member": name}            of the enumeration of which one is there already
    {"~dtype": "float32"}        a type of torch's
    {"~deque": [most, [...]]}    a collections.deque
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from raycloud.checkpoint.naming import damaged
from raycloud.errors import TaskError

DEEPEST = 64
LARGEST_BITS = 4096

KINDS: dict[str, type] = {
    "tensor": str,
    "array": str,
    "scalar": str,
    "object": dict,
    "live": type(None),
    "member": str,
    "dtype": str,
    "deque": list,
}

_DICTS: dict[str, type] = {"~dict": dict, "~counter": Counter, "~ordered": OrderedDict}
_SURROGATE = re.compile("[\ud800-\udfff]")
_BITS = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Tagged:
    """Stands for what is no plain value: one of `KINDS`, and plain values that say which."""

    kind: str
    content: Any


def encode(value: object, *, where: str = "values") -> Any:
    """Turn plain Python state into JSON values; `decode` is the inverse.

    Subclasses of int, float and str (an enum's member, numpy's float64) come back as plain ones.

    Raises:
        TaskError: Something else is in it (a tensor, an object, a loop); names its key path, which
            begins with `where`.
    """
    return _encoded(value, where, 0)


def decode(value: object, *, where: str = "values") -> Any:
    """Turn JSON values back into the state that `encode` was given.

    Raises:
        DamagedError: `encode` does not write such values; names the key path.
    """
    return _decoded(value, where, 0)


def _encoded(value: object, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise _unfit(where, f"lies deeper than {DEEPEST} levels, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise _unfit(where, "is a string with half a character (a lone surrogate)")
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > LARGEST_BITS:
            raise _unfit(where, f"is an integer of more than {LARGEST_BITS} bits")
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"~float": struct.pack(">d", number).hex()}
    if type(value) is list or type(value) is tuple:
        items = [_encoded(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if type(value) is list else {"~tuple": items}
    if isinstance(value, dict):
        return _encoded_dict(value, where, depth)
    if type(value) is Tagged:
        return {f"~{value.kind}": _encoded(value.content, where, depth + 1)}
    if type(value).__module__.partition(".")[0] == "torch":
        raise _unfit(where, f"is a {type(value).__name__}: tensors belong among the tensors")
    raise _unfit(where, f"is a {type(value).__module__}.{type(value).__qualname__}")


def _encoded_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    tag = next((tag for tag, kind in _DICTS.items() if kind is type(value)), None)
    if tag is None:
        raise _unfit(where, f"is a {type(value).__qualname__}")
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise _unfit(where, f"has a key {key!r:.80} of type {type(key).__name__}")
    pairs = [
        [_encoded(key, where, depth + 1), _encoded(item, f"{where}[{key!r:.80}]", depth + 1)]
        for key, item in value.items()
    ]
    if tag == "~dict" and all(type(key) is str and not key.startswith("~") for key in value):
        return dict(pairs)
    return {tag: pairs}


def _unfit(where: str, problem: str) -> TaskError:
    return TaskError(
        f"state for a checkpoint: {where} {problem}",
        hint="state is made of None, bool, int, float, str, list, tuple and dict with string or "
        "integer keys; turn numpy values into Python ones with .item() or .tolist()",
    )


def _decoded(value: Any, where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise damaged(where, f"lies deeper than {DEEPEST} levels")
    if isinstance(value, list):
        return [_decoded(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tagged = [key for key in value if key.startswith("~")]
    if not tagged:
        return {key: _decoded(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if len(value) != 1:
        raise damaged(where, f"mixes the tag {tagged[0][:20]!r} with other keys")
    tag, content = tagged[0], value[tagged[0]]
    if tag == "~float":
        if not isinstance(content, str) or _BITS.fullmatch(content) is None:
            raise damaged(where, "is not the bits of a float")
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "~tuple" and isinstance(content, list):
        return tuple(_decoded(content, where, depth))
    if tag[1:] in KINDS:
        inner = _decoded(content, where, depth + 1)
        if not isinstance(inner, KINDS[tag[1:]]):
            raise damaged(where, f"has a {type(inner).__name__} with the tag {tag!r}")
        return Tagged(tag[1:], inner)
    if tag in _DICTS and isinstance(content, list):
        return _decoded_pairs(_DICTS[tag](), content, where, depth)
    raise damaged(where, f"has the unknown tag {tag[:20]!r}")


def _decoded_pairs(made: dict[Any, Any], content: list[Any], where: str, depth: int) -> Any:
    for pair in content:
        match pair:
            case [str() | int() as key, item] if not isinstance(key, bool):
                if key in made:
                    raise damaged(where, f"has the key {key!r:.80} twice")
                made[key] = _decoded(item, f"{where}[{key!r:.80}]", depth + 1)
            case _:
                raise damaged(where, "is not a list of keys and values")
    return made
