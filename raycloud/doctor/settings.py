"""What an environment says about Ray, and the file of its token; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What an environment says about Ray; the token itself is never kept.

    Attributes:
        auth_mode: `RAY_AUTH_MODE`, in small letters; None where it is not set.
        token_variable: Whether `RAY_AUTH_TOKEN` holds a token.
        token_path: The file that is read where it does not: `RAY_AUTH_TOKEN_PATH`, else
            `~/.ray/auth_token`.
        tls: Whether `RAY_USE_TLS` asks for encryption.
        tls_files: The files it then needs, by variable; empty paths where one is not named.
        temp: Where Ray keeps its sessions (`RAY_TMPDIR`, else `TMPDIR`, else /tmp).
        interfaces: `NCCL_SOCKET_IFNAME`: which network interfaces NCCL may use.
    """

    auth_mode: str | None = None
    token_variable: bool = False
    token_path: Path = Path("~/.ray/auth_token")
    tls: bool = False
    tls_files: Mapping[str, str] = field(default_factory=dict)
    temp: Path = Path("/tmp")
    interfaces: str = ""

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str]) -> Settings:
        """The settings that these variables describe.

        >>> found = Settings.from_mapping({"RAY_AUTH_MODE": "TOKEN", "HOME": "/h"})
        >>> found.auth_mode, str(found.token_path)
        ('token', '/h/.ray/auth_token')
        """
        names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
        default = Path(variables.get("HOME") or "~", ".ray", "auth_token")
        named = variables.get("RAY_AUTH_TOKEN_PATH")
        return cls(
            auth_mode=(variables.get("RAY_AUTH_MODE") or "").strip().lower() or None,
            token_variable=bool((variables.get("RAY_AUTH_TOKEN") or "").strip()),
            token_path=Path(named) if named else default,
            tls=(variables.get("RAY_USE_TLS") or "").strip().lower() in _TRUE,
            tls_files={name: variables.get(name, "") for name in names},
            temp=Path(variables.get("RAY_TMPDIR") or variables.get("TMPDIR") or "/tmp"),
            interfaces=(variables.get("NCCL_SOCKET_IFNAME") or "").strip(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A token's file as it lies on the disk.

    Attributes:
        path: Where.
        mode: Its permission bits.
        ours: Whether it belongs to the user who asks, or to root.
        empty: Whether nothing stands in it.
        folder_mode: The permission bits of its folder.
    """

    path: str
    mode: int
    ours: bool
    empty: bool
    folder_mode: int
