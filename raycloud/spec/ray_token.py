"""The token that Ray clusters ask for, found where Ray itself looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import SpecError

if TYPE_CHECKING:
    from raycloud.spec.environment import Environment

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
