"""The settings that come from the process's environment: read here and in `cli` only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CACHE = Path("~/.cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the environment says, as values.

    Attributes:
        ray_address: Address of a running Ray cluster (`RAY_ADDRESS`); `None` starts one of our own.
        no_color: Terminal output is plain (`NO_COLOR` is set and not empty: no-color.org).
        dumb_terminal: The terminal cannot move its cursor (`TERM=dumb`), so progress is lines.
        cache: Where this node keeps preprocessed rows: `RAYCLOUD_CACHE`, else `raycloud` in
            `XDG_CACHE_HOME`, else in `~/.cache`. `~` is not expanded: a node has its own.
    """

    ray_address: str | None = None
    no_color: bool = False
    dumb_terminal: bool = False
    cache: Path = _CACHE / "raycloud"

    @classmethod
    def from_process(cls) -> Environment:
        """The environment of this process, now."""
        return cls.from_mapping(os.environ)

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str]) -> Environment:
        """The environment that these variables describe.

        >>> environment = Environment.from_mapping({"NO_COLOR": "1", "RAY_ADDRESS": " "})
        >>> environment.ray_address, environment.no_color, str(environment.cache)
        (None, True, '~/.cache/raycloud')
        """
        own = variables.get("RAYCLOUD_CACHE", "").strip()
        caches = Path(variables.get("XDG_CACHE_HOME", ""))
        # "If the path is relative, consider it invalid and ignore it" (XDG base directories).
        shared = (caches if caches.is_absolute() else _CACHE) / "raycloud"
        return cls(
            ray_address=variables.get("RAY_ADDRESS", "").strip() or None,
            no_color=bool(variables.get("NO_COLOR")),
            dumb_terminal=variables.get("TERM") == "dumb",
            cache=Path(own) if own else shared,
        )
