"""Events as JSON-ready records, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from raycloud.events import Event

_KINDS: dict[str, Callable[..., Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_record(event: Event) -> dict[str, Any]:
    """The event as JSON-ready values, its kind under `event`; `from_record` is the inverse."""
    return {"event": type(event).__name__, **asdict(event)}


def from_record(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `to_record`'s values; the log's own keys (`t`, `format`) are ignored.

    Raises:
        ValueError: The kind is not known to this version.
    """
    kind = _KINDS.get(str(record.get("event")))
    if kind is None:
        raise ValueError(f"unknown event {record.get('event')!r}: written by a newer raycloud?")
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k in names}
    return kind(**values)
