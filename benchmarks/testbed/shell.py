"""Runs ip, tc and nsenter with errors that say what was asked; waits for what takes a moment."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NAMESPACES = Path("/run/netns")  # where iproute2 keeps the names
_COMMAND_S = 60.0
_POLL_S = 0.005
SETTINGS = "/proc/sys/net"  # shows those of the namespace of who looks


class ToolError(Exception):
    """A command of the system failed; holds the command and what it said."""


class LateError(Exception):
    """Something that should happen within a limit did not; names it and the limit."""


def run(command: Sequence[str], *, given: str = "") -> str:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        given: Its standard input.

    Returns:
        Its standard output.

    Raises:
        ToolError: It is not there, failed, or took longer than a minute.
    """
    try:
        done = subprocess.run(
            list(command),
            input=given,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except FileNotFoundError:
        raise ToolError(f"{command[0]}: not found; install iproute2 and util-linux") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"{' '.join(command)}: not done after {_COMMAND_S:.0f} s") from None
    if done.returncode != 0:
        asked = f"{' '.join(command)}\n{given}".strip()
        raise ToolError(f"{asked}\nended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(lines: Sequence[str]) -> None:
    """Run `ip` commands in the host's namespace, all in one process.

    Args:
        lines: Each without the leading `ip`.

    Raises:
        ToolError: One failed; those before it have happened.
    """
    if lines:
        run(["ip", "-batch", "-"], given="\n".join(lines) + "\n")


def entering(namespace: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a network namespace, and in nothing else of it.

    `ip netns exec` would also remount /sys, which hides the cgroups.

    Args:
        namespace: Its name.
        command: Program and arguments.
    """
    nsenter = shutil.which("nsenter") or "nsenter"
    return [nsenter, f"--net={NAMESPACES / namespace}", "--", *command]


def inside(
    namespace: str,
    *,
    settings: Mapping[str, str] | None = None,
    ip: Sequence[str] = (),
    tc: Sequence[str] = (),
) -> None:
    """Set up a namespace from inside: settings, then `ip` commands, then `tc` commands.

    Args:
        namespace: Its name.
        settings: Values by path below /proc/sys/net. What this kernel lacks or refuses stays.
        ip: Commands, each without the leading `ip`.
        tc: Commands, each without the leading `tc`.

    Raises:
        ToolError: A command failed; those before it have happened.
    """
    script = ["set -e"]
    for name, value in (settings or {}).items():
        file = f"{SETTINGS}/{name}"
        script.append(f"if [ -w {file} ]; then echo {value} 2>/dev/null >{file} || true; fi")
    for program, lines in (("ip", ip), ("tc", tc)):
        if lines:
            script += [f"{program} -batch - <<'END'", *lines, "END"]
    run(entering(namespace, ["sh"]), given="\n".join(script) + "\n")


def wait_for(what: str, look: Callable[[], bool], *, limit_s: float) -> None:
    """Ask again and again until it is so.

    Args:
        what: Named in the error.
        look: Whether it is.
        limit_s: Seconds to wait at most.

    Raises:
        LateError: It is still not.
    """
    end_s = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > end_s:
            raise LateError(f"{what}: not within {limit_s:g} s")
        time.sleep(_POLL_S)
