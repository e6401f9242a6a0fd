"""Checks of who may connect: tokens and their files, encryption, addresses that listen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raycloud.doctor.finding import Check, Finding, Kind, Level, well

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts, Listener
    from raycloud.doctor.settings import TokenFile

MODES = ("token", "disabled")
FIXED_PORTS = {6379: "gcs_server", 8265: "dashboard", 10001: "Ray client server"}

MODE_UNKNOWN = Kind(
    name="auth-mode-unknown",
    level=Level.CHANGE,
    what="RAY_AUTH_MODE has a value that Ray does not know.",
    remedy="Set RAY_AUTH_MODE=token, on every machine of the cluster and where you submit from.",
)
AUTH_OFF = Kind(
    name="auth-off",
    level=Level.CHANGE,
    what="Ray started from here asks for no token: who reaches its ports runs code as you.",
    remedy="Unset RAY_AUTH_MODE or set it to `token`; `ray get-auth-token --generate` makes a "
    "token for `ray start`.",
)
CLUSTER_OPEN = Kind(
    name="cluster-open",
    level=Level.CHANGE,
    what="The cluster asks for no token: who reaches its ports runs code on every node.",
    remedy="`ray get-auth-token --generate` on the head, copy the file to each node, and start "
    "Ray anew with RAY_AUTH_MODE=token. Until then keep its ports behind a firewall.",
)
TOKEN_MISSING = Kind(
    name="token-missing",
    level=Level.CHANGE,
    what="RAY_AUTH_MODE=token, and there is no token.",
    remedy="Copy the cluster's token to ~/.ray/auth_token (chmod 600), or name its file in "
    "RAY_AUTH_TOKEN_PATH; for a new cluster: `ray get-auth-token --generate`.",
)
TOKEN_EMPTY = Kind(
    name="token-empty",
    level=Level.CHANGE,
    what="The token's file is empty.",
    remedy="Copy the cluster's token into it again, or remove it and call "
    "`ray get-auth-token --generate`.",
)
TOKEN_READABLE = Kind(
    name="token-readable",
    level=Level.CHANGE,
    what="Other users of this machine can read the token.",
    remedy="`chmod 600` the file. If others may have read it, make a new token and start Ray anew.",
)
TOKEN_FOREIGN = Kind(
    name="token-foreign",
    level=Level.CHANGE,
    what="The token's file, or its folder, can be replaced by another user.",
    remedy="Keep it in a folder that only you can write (`chmod 700`), as a file of your own.",
)
TLS_BROKEN = Kind(
    name="tls-incomplete",
    level=Level.CHANGE,
    what="RAY_USE_TLS is set, and a file it needs is not named or cannot be read.",
    remedy="Set RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT to readable files, or "
    "unset RAY_USE_TLS.",
)
IN_CLEAR = Kind(
    name="traffic-in-clear",
    level=Level.NOTE,
    what="What Ray sends between machines, the token included, is not encrypted.",
    remedy="Fine in a private network. Elsewhere use a VPN; RAY_USE_TLS=1 encrypts Ray's own "
    "traffic, and not what members exchange (gloo, NCCL).",
)
DASHBOARD_WIDE = Kind(
    name="dashboard-wide",
    level=Level.NOTE,
    what="The dashboard listens for other machines; its page and its metrics ask for no token.",
    remedy="Start the head with `--dashboard-host 127.0.0.1` and reach it through "
    "`ssh -L 8265:127.0.0.1:8265 HEAD`.",
)
PORT_TAKEN = Kind(
    name="port-taken",
    level=Level.NOTE,
    what="A port that `ray start --head` takes belongs to another program.",
    remedy="Give the head another one: `--port`, `--dashboard-port`, `--ray-client-server-port`. "
    "Runs without an address need none of them.",
)


def _auth(facts: Facts) -> Iterator[Finding]:
    mode, where = facts.settings.auth_mode, "RAY_AUTH_MODE"
    if mode is None:
        text = "not set: Ray started by a run uses a token; `ray start` does if there is one"
        yield well("auth", where, text)
    elif mode not in MODES:
        yield MODE_UNKNOWN.at(where, repr(mode))
    elif mode == "disabled":
        yield AUTH_OFF.at(where, mode)
    else:
        yield well("auth", where, mode)
    cluster = facts.cluster
    if cluster and not cluster.failure:
        where = f"cluster {cluster.address}"
        if cluster.auth_mode == "disabled":
            yield CLUSTER_OPEN.at(where, "RAY_AUTH_MODE is not `token` there")
        else:
            yield well("auth", where, cluster.auth_mode or "cannot be seen from here")


def _token(facts: Facts) -> Iterator[Finding]:
    settings, here = facts.settings, facts.machine
    if settings.token_variable:
        yield well("token", here.name, "RAY_AUTH_TOKEN is set")
    elif here.token is None and settings.auth_mode == "token":
        yield TOKEN_MISSING.at(here.name, f"no file {settings.token_path}")
    elif here.token is None:
        yield well("token", here.name, "none; Ray makes one when it needs it")
    for machine in facts.machines:
        if machine.token:
            yield from _token_file(machine.name, machine.token)


def _token_file(where: str, token: TokenFile) -> Iterator[Finding]:
    """A file that others can read is a fault also while no run reads it."""
    bad = list[Finding]()
    if token.empty:
        bad.append(TOKEN_EMPTY.at(where, token.path))
    if token.mode & 0o077:
        bad.append(TOKEN_READABLE.at(where, f"{token.path}: mode {token.mode:04o}"))
    if not token.ours:
        bad.append(TOKEN_FOREIGN.at(where, f"{token.path} is another user's"))
    elif token.folder_mode & 0o022 and not token.folder_mode & 0o1000:
        value = f"{token.path}: its folder has mode {token.folder_mode:04o}"
        bad.append(TOKEN_FOREIGN.at(where, value))
    yield from bad or [well("token", where, f"{token.path}: mode {token.mode:04o}")]


def _encryption(facts: Facts) -> Iterator[Finding]:
    for name in facts.missing_files:
        yield TLS_BROKEN.at(name, facts.settings.tls_files.get(name) or "not set")
    cluster = facts.cluster
    if not cluster or cluster.failure:
        return
    where = f"cluster {cluster.address}"
    if cluster.tls:
        yield well("encryption", where, "RAY_USE_TLS; members' own sockets are not encrypted")
    elif len(cluster.nodes) > 1 or not _loopback(cluster.address):
        yield IN_CLEAR.at(where, f"{len(cluster.nodes)} node(s), no TLS")
    else:
        yield well("encryption", where, "none, and nothing leaves this machine")


def _listening(facts: Facts) -> Iterator[Finding]:
    for machine in facts.machines:
        own = [listener for listener in machine.listeners if listener.program]
        for listener in own:
            if listener.program == "dashboard" and listener.wide:
                yield DASHBOARD_WIDE.at(machine.name, f"{listener.address}:{listener.port}")
        if own:
            yield well("listening", machine.name, _told(own))
    taken = {one.port for one in facts.machine.listeners if not one.program}
    for port, program in FIXED_PORTS.items():
        if port in taken:
            yield PORT_TAKEN.at(facts.machine.name, f"{port} ({program})")


def _told(listeners: Sequence[Listener]) -> str:
    """Each program with its addresses; `*` is every interface."""
    places = dict[str, list[str]]()
    for one in listeners:
        address = "*" if one.address in {"0.0.0.0", "::"} else one.address
        address = address.removeprefix("::ffff:")
        shown = f"[{address}]" if ":" in address else address
        places.setdefault(one.program, []).append(f"{shown}:{one.port}")
    return "; ".join(
        f"{program} {' '.join(dict.fromkeys(where))}" for program, where in places.items()
    )


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host.startswith("127.") or host in {"localhost", "::1"}


CHECKS = (
    Check(
        name="auth",
        asks="Does Ray ask for a token, here and in the cluster?",
        kinds=(MODE_UNKNOWN, AUTH_OFF, CLUSTER_OPEN),
        look=_auth,
    ),
    Check(
        name="token",
        asks="Is there a token, and can nobody else read or replace it?",
        kinds=(TOKEN_MISSING, TOKEN_EMPTY, TOKEN_READABLE, TOKEN_FOREIGN),
        look=_token,
    ),
    Check(
        name="encryption",
        asks="Is Ray's traffic encrypted, where it leaves the machine?",
        kinds=(TLS_BROKEN, IN_CLEAR),
        look=_encryption,
    ),
    Check(
        name="listening",
        asks="Which programs of Ray listen on which addresses, and are its fixed ports free?",
        kinds=(DASHBOARD_WIDE, PORT_TAKEN),
        look=_listening,
    ),
)
