"""The settings that come from the process's environment: read here and in `cli` only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raycloud.errors import SpecError
from raycloud.redact import secrets_among

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
        jobs_address: Where a cluster's Jobs API answers: `RAY_API_SERVER_ADDRESS`, else
            `RAY_ADDRESS` where it is an `http` address.
        auth_token: The token of Ray clusters, in the environment (`RAY_AUTH_TOKEN`).
        auth_token_path: The file that holds it (`RAY_AUTH_TOKEN_PATH`).
        cloud: Which cloud this node is in, `none` to ask nobody (`RAYCLOUD_CLOUD`); `None`: look.
        variables: All of it, for the secrets that a job names.
    """

    ray_address: str | None = None
    no_color: bool = False
    dumb_terminal: bool = False
    cache: Path = _CACHE / "raycloud"
    jobs_address: str | None = None
    auth_token: str | None = field(default=None, repr=False)
    auth_token_path: Path | None = None
    cloud: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def secrets(self) -> set[str]:
        """The values in it that no file may hold."""
        return secrets_among(self.variables)

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
        ray = variables.get("RAY_ADDRESS", "").strip()
        http = ray if ray.startswith(("http://", "https://")) else ""
        token_path = variables.get("RAY_AUTH_TOKEN_PATH", "").strip()
        shared = (caches if caches.is_absolute() else _CACHE) / "raycloud"
        return cls(
            ray_address=ray or None,
            no_color=bool(variables.get("NO_COLOR")),
            dumb_terminal=variables.get("TERM") == "dumb",
            cache=Path(own) if own else shared,
            jobs_address=variables.get("RAY_API_SERVER_ADDRESS", "").strip() or http or None,
            auth_token=variables.get("RAY_AUTH_TOKEN", "").strip() or None,
            auth_token_path=Path(token_path) if token_path else None,
            cloud=variables.get("RAYCLOUD_CLOUD", "").strip().lower() or None,
            variables=dict(variables),
        )


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those of these that nobody has set: for libraries that take their settings from there."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


KEPT = Path("~/.ray/auth_token")

_MOST_BYTES = 1 << 16


def ray_token(environment: Environment) -> str | None:
    """The token to show to a Ray cluster; None if there is none.

    Ray's own order: `RAY_AUTH_TOKEN`, the file of `RAY_AUTH_TOKEN_PATH`, `~/.ray/auth_token`.

    Raises:
        SpecError: The file that was named cannot be read, or what was found is no token.
    """
    if environment.auth_token is not None:
        return _checked("RAY_AUTH_TOKEN", environment.auth_token)
    named = environment.auth_token_path
    try:
        with (named or KEPT).expanduser().open("rb") as file:
            text = file.read(_MOST_BYTES).decode().strip()
    except (OSError, UnicodeError, RuntimeError) as error:  # RuntimeError: there is no home
        if named is None:
            return None
        raise SpecError(
            "RAY_AUTH_TOKEN_PATH", str(named), f"cannot be read: {error}", hint="name another file"
        ) from error
    return _checked(str(named or KEPT), text) if text else None


def _checked(source: str, token: str) -> str:
    """The token, if an HTTP header can carry it."""
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    raise SpecError(
        source,
        "...",
        "is no token: it holds a space, or a character that HTTP cannot carry",
        hint="take what the cluster was started with, without quotes or line ends",
    )
