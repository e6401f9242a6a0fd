"""What `settings` may hold: the values that a job file can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raycloud.spec.sections import wrong
from raycloud.spec.yaml_text import is_unicode

_DEEPEST = 32  # levels of lists and names
_LARGEST = 10**300  # whole numbers stay below: more digits read back as text


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy that YAML can hold and give back equal: tuples become lists.

    Raises:
        PydanticCustomError: A value is of a type that a job file cannot hold.
    """
    odd = [key for key in settings if not is_unicode(key)]
    if odd:
        raise wrong(f"has the name {odd[0]!r}", "a name is text")
    return {key: _plain(value, (key,)) for key, value in settings.items()}


def _plain(value: object, at: tuple[str, ...]) -> object:
    below = ".".join(at)
    if len(at) > _DEEPEST:
        raise wrong(f"goes deeper than {_DEEPEST} levels", "flatten it", below=at[0], value=...)
    if isinstance(value, Mapping):
        odd = [key for key in value if type(key) is not str or not is_unicode(key)]
        if odd:
            raise wrong(f"has the name {odd[0]!r}", "a name is text", below=below, value=value)
        return {key: _plain(entry, (*at, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, (*at, str(i))) for i, entry in enumerate(value)]
    if isinstance(value, str) and not is_unicode(value):
        raise wrong("is not Unicode text", "write bytes in hexadecimal", below=below, value=value)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise wrong("is too large for a job file", "write it as text", below=below, value="…")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(
            "is not a finite number",
            "write it as text and convert it in the task",
            below=below,
            value=value,
        )
    if type(value) not in {str, int, float, bool, type(None)}:
        raise wrong(
            f"a job file cannot hold a value of type {type(value).__name__}",
            "give text, a number, true, false, null, a list or names with values",
            below=below,
            value=value,
        )
    return value
