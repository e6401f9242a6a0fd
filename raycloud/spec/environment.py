"""The settings that come from the process's environment: read here and in `cli` only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the environment says, as values.

    Attributes:
        ray_address: Address of a running Ray cluster (`RAY_ADDRESS`); `None` starts one of our own.
        no_color: Terminal output is plain (`NO_COLOR` is set and not empty: no-color.org).
        dumb_terminal: The terminal cannot move its cursor (`TERM=dumb`), so progress is lines.
    """

    ray_address: str | None = None
    no_color: bool = False
    dumb_terminal: bool = False

    @classmethod
    def from_process(cls) -> Environment:
        """The environment of this process, now."""
        return cls.from_mapping(os.environ)

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str]) -> Environment:
        """The environment that these variables describe.

        >>> Environment.from_mapping({"NO_COLOR": "1", "RAY_ADDRESS": " "})
        Environment(ray_address=None, no_color=True, dumb_terminal=False)
        """
        return cls(
            ray_address=variables.get("RAY_ADDRESS", "").strip() or None,
            no_color=bool(variables.get("NO_COLOR")),
            dumb_terminal=variables.get("TERM") == "dumb",
        )
