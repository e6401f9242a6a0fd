"""Where a cluster's Jobs API answers, and whether it may be spoken to. Speaks to nobody.

A submitted job runs code on the cluster, so a token is wanted for everything but this machine, and
neither token nor code goes out in clear unless that is asked for.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from raycloud.errors import JobError, SpecError
from raycloud.spec import Environment
from raycloud.spec.ray_token import ray_token

LOCAL = "http://127.0.0.1:8265"
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # as requests reads them

TOKEN_HINT = (
    "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that only you may read, or keep it in "
    "~/.ray/auth_token"
)
TUNNEL_HINT = "go through `ssh -L 8265:127.0.0.1:8265 HEAD` and --address http://127.0.0.1:8265"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a cluster's Jobs API answers, checked.

    Attributes:
        url: `http://host:port` or `https://...`, without a path.
        loopback: Whether that is this machine.
        token: What is shown there; None shows nothing.
        certificates: A file or folder of those that an https server is checked with; None: those
            that come with `requests`.
    """

    url: str
    loopback: bool
    token: str | None = field(repr=False)
    certificates: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def refused(self) -> JobError:
        """What to raise where the cluster does not take what it was shown."""
        if self.token is None:
            return JobError(
                f"the cluster at {self.url} asks for a token, and got none", hint=TOKEN_HINT
            )
        return JobError(
            f"the cluster at {self.url} refuses this token",
            hint=f"it is another cluster's: {TOKEN_HINT}",
        )


def endpoint(
    address: str | None, *, insecure: bool = False, environment: Environment | None = None
) -> Endpoint:
    """Decide whether a cluster may be spoken to; speaks to nobody.

    Args:
        address: `http://host:port`, `https://host:port` or `host:port`; None takes
            `RAY_API_SERVER_ADDRESS`, then a `RAY_ADDRESS` with `http`, then this machine's 8265.
        insecure: Whether a token and code may go out in clear.
        environment: The settings to look at; None: this process's.

    Raises:
        SpecError: The address is none, or leads elsewhere than this machine without a token, or in
            clear; or the certificates for it are not where a variable says.
    """
    environment = environment or Environment.from_process()
    url, host = _parsed(address or environment.jobs_address or LOCAL)
    loopback = _is_loopback(host)
    if url.startswith("http:") and not loopback and not insecure:
        raise SpecError(
            "--address",
            url,
            "is not this machine, and http sends the token and your code in clear",
            hint=f"{TUNNEL_HINT}; or give an https address; or, on a private network, --insecure",
        )
    token = ray_token(environment)
    if token is None and not loopback:
        raise SpecError(
            "--address",
            url,
            "is not this machine, and there is no token to show to it",
            hint=f"start the cluster with RAY_AUTH_MODE=token, and {TOKEN_HINT}",
        )
    certificates = _certificates(environment) if url.startswith("https:") else None
    return Endpoint(url=url, loopback=loopback, token=token, certificates=certificates)


def _certificates(environment: Environment) -> Path | None:
    """Where those lie that servers are checked with, if a variable says it.

    Raises:
        SpecError: There is nothing.
    """
    for name in _CERTIFICATES:
        said = environment.variables.get(name, "").strip()
        if not said:
            continue
        if not Path(said).exists():
            raise SpecError(
                name,
                said,
                "is neither a file nor a folder of certificates",
                hint=f"name one that is there, or unset {name}",
            )
        return Path(said)
    return None


def _parsed(address: str) -> tuple[str, str]:
    """The address as a URL without a path, and its host.

    Raises:
        SpecError: It is no address of a Jobs API.
    """
    hint = f"write http://HOST:8265 or https://HOST, as in {LOCAL}"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SpecError("--address", address, f"is no address: {error}", hint=hint) from None
    if parts.username is not None or parts.password is not None:
        raise SpecError(
            "--address",
            f"{parts.scheme}://...@{host}",
            "holds a password; a token is not written into an address",
            hint=TOKEN_HINT,
        )
    if parts.scheme not in {"http", "https"} or not host:
        raise SpecError("--address", address, "is not the address of a Jobs API", hint=hint)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise SpecError("--address", address, "has something after the port", hint=hint)
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}" + (f":{port}" if port else ""), host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
