"""Secrets of a job: asked for by name, filled in where they are used, left out where it is kept.

A location may carry credentials: user and password before the host, or a token in the query. Where
a job writes them as `${NAME}`, their values come from the environment of the process that starts
the run, and what is kept of the job holds the name. Where it holds a secret itself, what is kept
has `[redacted]` in its place, and a resumed run has to be told it again. Settings with a secret's
name are treated alike, with all that lies below them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from raycloud.errors import SpecError
from raycloud.redact import GONE, is_secret_name, redact_text, secrets_in

if TYPE_CHECKING:
    from raycloud.spec.job import Job

# Fields that hold a location which may be a URL.
_LOCATIONS = {"data.path", "checkpoint.path", "tracking.mlflow.uri"}

_URL = re.compile(
    r"(?P<head>[a-z][a-z0-9+.-]*://)"
    r"(?:(?P<user>[^\s/?#]*|[^\s/@?#:]*:(?!\d+/)[^\s@?#]*)@)?"
    r"(?P<place>[^?#]*)(?P<query>\?[^#]*)?(?P<rest>#.*)?",
    re.IGNORECASE | re.DOTALL,
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# What stands before their `@` without a colon is a user or a container, not a token.
_NAMES = frozenset(
    {"abfs", "abfss", "wasb", "wasbs", "sftp", "ssh", "hdfs", "webhdfs", "smb", "ftp"}
)

Section = TypeVar("Section", bound=BaseModel)
# A field, the text in it, and whether it is a setting under a secret's name -> the new text.
_Change = Callable[[str, str, bool], str]


def kept(job: Job) -> Job:
    """The job as it is written down: `${NAME}` as it stands, every other secret left out."""
    return _changed(job, _kept_text)


def literal(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields that hold a secret themselves, each with what would be kept of it.

    `values` are those of a job, or some of them, as in a job file.

    >>> list(literal({"settings": {"api_key": "abc", "hf_token": "${HF}"}, "data": {"path": "a"}}))
    [('settings.api_key', '[redacted]')]
    """
    found: list[tuple[str, str]] = []

    def note(field: str, text: str, secret: bool) -> str:  # noqa: FBT001
        shown = _kept_text(field, text, secret)
        if shown != text:
            found.append((field, shown))
        return text

    _walked(values, note)
    yield from found


def kept_word(word: str) -> str:
    """A word of a command as it may be shown: of a field and its value, what would be kept of it.

    >>> kept_word("settings.api_key=a b"), kept_word("--set=settings.api_key=${KEY}")
    ('settings.api_key=[redacted]', '--set=settings.api_key=${KEY}')
    """
    option = "--set=" if word.startswith("--set=") else ""
    field, equals, value = word.removeprefix(option).partition("=")
    if not equals:
        return redact_text(word)
    secret = any(is_secret_name(name) for name in field.split("."))
    return f"{option}{field}={_kept_text('settings', value, secret)}"


def filled(job: Job, variables: Mapping[str, str]) -> Job:
    """The job as it runs: every `${NAME}` of a secret replaced by the variable's value.

    `checkpoint.path` is from the root, as in what is kept: all who write there mean one place.

    Raises:
        SpecError: A variable is missing; or the job is one that was kept, without its secrets.
    """

    def fill(field: str, text: str, secret: bool) -> str:  # noqa: FBT001
        if secret:
            return _value(field, text, "", variables)
        if field not in _LOCATIONS and GONE in text:
            raise _not_kept(field, text)
        return _at_secrets(text, lambda part: _value(field, part, text, variables))

    job = _changed(job, fill)
    place = job.resolved().checkpoint.path
    checkpoint = job.checkpoint.model_copy(update={"path": place})
    return job.model_copy(update={"checkpoint": checkpoint})


def secrets_of(job: Job) -> set[str]:
    """The secrets that a filled job holds, in each spelling."""
    found: set[str] = set()

    def note(_: str, text: str, secret: bool) -> str:  # noqa: FBT001
        found.update({text} if secret else secrets_in(text))
        return text

    _walked(job.model_dump(), note)
    return found


def place_of(location: str | None) -> str | None:
    """A location without anything that may be a secret: what two of them are compared by.

    >>> place_of("https://me:${PASSWORD}@host/a?id=1&token=abc")
    'https://host/a?id=1'
    """
    return None if location is None else _at_secrets(location, None)


def _changed(section: Section, change: _Change, values: Any = None) -> Section:
    """The job with its texts changed; not checked again, since it may be on its way to be whole."""
    values = _walked(section.model_dump(), change) if values is None else values
    inner = {name: value for name, value in section if isinstance(value, BaseModel)}
    new = {name: _changed(value, change, values[name]) for name, value in inner.items()}
    return section.model_copy(update={**values, **new})


def _walked(value: Any, change: _Change, at: str = "", *, secret: bool = False) -> Any:
    """Values of a job, the texts in its locations and settings passed through a function."""
    in_settings = at == "settings" or at.startswith("settings.")
    if isinstance(value, str):
        return change(at, value, secret) if in_settings or at in _LOCATIONS else value
    if isinstance(value, Mapping):
        return {
            name: _walked(
                inner,
                change,
                f"{at}.{name}" if at else str(name),
                secret=secret or (in_settings and is_secret_name(str(name))),
            )
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        new = [_walked(v, change, f"{at}.{i}", secret=secret) for i, v in enumerate(value)]
        return tuple(new) if isinstance(value, tuple) else new
    return value


def _kept_text(field: str, text: str, secret: bool) -> str:  # noqa: FBT001
    shown = _kept_url(text)
    if field in _LOCATIONS or _REFERENCE.fullmatch(text):
        return shown
    return GONE if secret and text else redact_text(shown)


def _kept_url(text: str) -> str:
    return _at_secrets(text, lambda part: part if _REFERENCE.fullmatch(part) else GONE)


def _at_secrets(text: str, put: Callable[[str], str] | None) -> str:
    """The URL with `put(secret)` for its password, token and secret query fields; None: without."""
    if "://" not in text:
        return text
    pieces = []
    for piece in text.split("::"):
        found = _URL.fullmatch(piece)
        pieces.append(piece if found is None else _piece_at_secrets(found, put))
    return "::".join(pieces)


def _piece_at_secrets(found: re.Match[str], put: Callable[[str], str] | None) -> str:
    user, scheme = found["user"], found["head"][:-3].lower()
    name, colon, password = (user or "").partition(":")
    if user and (colon or scheme not in _NAMES):
        if put is None:
            user = None
        else:
            user = f"{name}:{put(password) if password else ''}" if colon else put(name)
    fields = [field.partition("=") for field in (found["query"] or "?")[1:].split("&")]
    if put is None:
        fields = [field for field in fields if field[0] and not is_secret_name(field[0])]
    else:
        fields = [(n, eq, put(v) if v and is_secret_name(n) else v) for n, eq, v in fields]
    query = "&".join("".join(field) for field in fields)
    before = found["head"] if user is None else f"{found['head']}{user}@"
    return before + found["place"] + (f"?{query}" if query else "") + (found["rest"] or "")


def _value(field: str, secret: str, url: str, variables: Mapping[str, str]) -> str:
    """What stands for a secret, alone or in a URL: the variable that it names, else itself."""
    if GONE in secret:
        raise _not_kept(field, url or secret)
    found = _REFERENCE.fullmatch(secret)
    if found is None:
        return secret
    value = variables.get(found[1])
    if not value:
        raise SpecError(
            field,
            _kept_url(url) if url else secret,
            f"the environment variable {found[1]} is not set",
            hint=f"set {found[1]} to the secret where the run is started",
        )
    return quote(value, safe="") if url else value


def _not_kept(field: str, text: str) -> SpecError:
    return SpecError(
        field,
        redact_text(text),
        "secrets are not kept in a run directory",
        hint="name the job file that has it: raycloud train JOB --resume --run-dir DIR; or write "
        "${NAME} in the secret's place there, and set NAME in the environment",
    )
