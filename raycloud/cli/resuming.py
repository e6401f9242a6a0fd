"""What the arguments of `train` say: `--resume` with a word after it, or alone; `--try`."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    import typer

_OPTION = "--resume"
_ARGUMENTS = "raycloud.arguments"


class Resuming(StrEnum):
    """The words after `--resume`: those of `raycloud.spec.Resume`, which would load pydantic."""

    MUST = "must"
    ALLOW = "allow"
    NEVER = "never"


class ResumingCommand(TyperCommand):
    """A command where `--resume` without one of its words means `--resume must`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command, once `--resume` has its word."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, worded(args))


def typed(ctx: typer.Context) -> list[str]:
    """What was typed behind the command's name, with a word behind `--resume`."""
    return worded(list(ctx.meta[_ARGUMENTS]))


def without_try(ctx: typer.Context) -> str:
    """The command as it was typed, but for `--try` and secrets."""
    return _command(ctx, [arg for arg in ctx.meta[_ARGUMENTS] if arg != "--try"])


def resumed(ctx: typer.Context, how: str) -> str:
    """The command as it was typed, but going on with its run, and without secrets.

    Args:
        ctx: Of the command.
        how: The word after `--resume`.
    """
    words, skipped = [], False
    for word in typed(ctx):
        if not skipped and word != _OPTION and not word.startswith(f"{_OPTION}="):
            words.append(word)
        skipped = word == _OPTION
    return _command(ctx, [*words, _OPTION, how])


def _command(ctx: typer.Context, words: list[str]) -> str:
    from raycloud.spec.secrets import kept_word  # loads pydantic

    return f"raycloud {ctx.info_name} {shlex.join(map(kept_word, words))}"


def worded(args: list[str]) -> list[str]:
    """The arguments, with `must` behind a `--resume` that stands alone.

    >>> worded(["--resume", "--run-dir", "d"]), worded(["--resume", "allow", "job.yaml"])
    (['--resume=must', '--run-dir', 'd'], ['--resume', 'allow', 'job.yaml'])
    >>> worded(["--resume", "job.yaml"]), worded(["--", "--resume"])
    (['--resume=must', 'job.yaml'], ['--', '--resume'])
    """
    told = args.index("--") if "--" in args else len(args)
    words = {word.value for word in Resuming}
    return [
        f"{_OPTION}={Resuming.MUST}"
        if arg == _OPTION and at < told and args[at + 1 : at + 2] not in [[word] for word in words]
        else arg
        for at, arg in enumerate(args)
    ]
