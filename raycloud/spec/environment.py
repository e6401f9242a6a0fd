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
    """What the environment says, as values; None where it says nothing."""

    ray_address: str | None = None  # of a running Ray cluster
    no_color: bool = False  # `NO_COLOR` is set and not empty: no-color.org
    dumb_terminal: bool = False  # it cannot move its cursor, so progress is lines
    cache: Path = _CACHE / "raycloud"  # of rows; `~` stays: a node has its own
    jobs_address: str | None = None  # of a cluster's Jobs API
    auth_token: str | None = field(default=None, repr=False)  # of Ray clusters,
    auth_token_path: Path | None = None  # and the file that holds it
    cloud: str | None = None  # which one this node is in, `none` to ask nobody
    # All of it, for the secrets that a job names.
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

        def said(name: str) -> str | None:
            return variables.get(name, "").strip() or None

        ray = said("RAY_ADDRESS")
        http = ray if ray and ray.startswith(("http://", "https://")) else None
        # "If the path is relative, consider it invalid and ignore it" (XDG base directories).
        caches = Path(variables.get("XDG_CACHE_HOME", ""))
        shared = (caches if caches.is_absolute() else _CACHE) / "raycloud"
        token_path = said("RAY_AUTH_TOKEN_PATH")
        return cls(
            ray_address=ray,
            no_color=bool(variables.get("NO_COLOR")),
            dumb_terminal=variables.get("TERM") == "dumb",
            cache=Path(said("RAYCLOUD_CACHE") or shared),
            jobs_address=said("RAY_API_SERVER_ADDRESS") or http,
            auth_token=said("RAY_AUTH_TOKEN"),
            auth_token_path=Path(token_path) if token_path else None,
            cloud=(said("RAYCLOUD_CLOUD") or "").lower() or None,
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
