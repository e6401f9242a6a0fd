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
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from raycloud.errors import SpecError
from raycloud.redact import GONE, is_secret_name, redact_text, secrets_in

if TYPE_CHECKING:
    from raycloud.spec.job import Job

# Fields that hold a location which may be a URL, by section.
_LOCATIONS = (("data", "path"), ("checkpoint", "path"), ("tracking", "mlflow", "uri"))

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


def kept(job: Job) -> Job:
    """The job as it is written down: `${NAME}` as it stands, every other secret left out."""
    return _changed(job, lambda _, text: _kept_url(text), _kept_setting)


def literal(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields that hold a secret themselves, each with what would be kept of it.

    Args:
        values: Those of a job, or some of them, as in a job file; those of no job have none.

    >>> list(literal({"settings": {"api_key": "abc", "hf_token": "${HF}"}, "data": {"path": "a"}}))
    [('settings.api_key', '[redacted]')]
    """
    found: list[tuple[str, str]] = []

    def setting(field: str, text: str, *, secret: bool) -> str:
        shown = _kept_setting(field, text, secret=secret)
        if shown != text:
            found.append((field, shown))
        return text

    for path in _LOCATIONS:
        value: Any = values
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, str) and (shown := _kept_url(value)) != value:
            found.append((".".join(path), shown))
    _walked(values.get("settings"), "settings", setting)
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
    return f"{option}{field}={_kept_setting(field, value, secret=secret)}"


def filled(job: Job, variables: Mapping[str, str]) -> Job:
    """The job as it runs: every `${NAME}` of a secret replaced by the variable's value.

    `checkpoint.path` is from the root, as in what is kept: all who write there mean one place.

    Args:
        job: What is asked.
        variables: The environment.

    Raises:
        SpecError: A variable is missing; or the job is one that was kept, without its secrets.
    """

    def url(field: str, text: str) -> str:
        return _at_secrets(text, lambda secret, url: _value(field, secret, url, variables))

    def setting(field: str, text: str, *, secret: bool) -> str:
        if secret:
            return _value(field, text, "", variables)
        if GONE in text:
            raise _not_kept(field, text)
        return url(field, text) if "://" in text else text

    job = _changed(job, url, setting)
    place = job.resolved().checkpoint.path
    checkpoint = job.checkpoint.model_copy(update={"path": place})
    return job.model_copy(update={"checkpoint": checkpoint})


def secrets_of(job: Job) -> set[str]:
    """The secrets that a filled job holds, in each spelling."""
    found: set[str] = set()

    def url(_: str, text: str) -> str:
        found.update(secrets_in(text))
        return text

    def setting(_: str, text: str, *, secret: bool) -> str:
        found.update({text} if secret else secrets_in(text))
        return text

    _changed(job, url, setting)
    return found


def place_of(location: str | None) -> str | None:
    """A location without anything that may be a secret: what two of them are compared by.

    >>> place_of("https://me:${PASSWORD}@host/a?id=1&token=abc")
    'https://host/a?id=1'
    """
    if location is None or "://" not in location:
        return location
    pieces = []
    for piece in location.split("::"):
        found = _URL.fullmatch(piece)
        if found is None:
            pieces.append(piece)
            continue
        user = f"{found['user']}@" if _is_name(found) else ""
        fields = (found["query"] or "?")[1:].split("&")
        query = "&".join(f for f in fields if f and not is_secret_name(f.partition("=")[0]))
        mark = "?" if query else ""
        pieces.append(found["head"] + user + found["place"] + mark + query + (found["rest"] or ""))
    return "::".join(pieces)


def _changed(job: Job, url: Callable[[str, str], str], setting: Callable[..., str]) -> Job:
    """The job with its locations and the texts in its settings passed through functions."""
    sections: dict[str, Any] = {}
    for top, *below in _LOCATIONS:
        section = sections.get(top, getattr(job, top))
        sections[top] = _replaced(section, below, ".".join((top, *below)), url)
    return job.model_copy(
        update={**sections, "settings": _walked(job.settings, "settings", setting)}
    )


def _replaced(section: Any, path: list[str], field: str, url: Callable[[str, str], str]) -> Any:
    name, *below = path
    inner = getattr(section, name)
    if inner is None:
        return section
    new = _replaced(inner, below, field, url) if below else url(field, inner)
    return section.model_copy(update={name: new})


def _walked(value: Any, at: str, setting: Callable[..., str], *, secret: bool = False) -> Any:
    if isinstance(value, str):
        return setting(at, value, secret=secret)
    if isinstance(value, Mapping):
        return {
            name: _walked(
                inner, f"{at}.{name}", setting, secret=secret or is_secret_name(str(name))
            )
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walked(v, f"{at}.{i}", setting, secret=secret) for i, v in enumerate(value)]
    return value


def _kept_url(text: str) -> str:
    return _at_secrets(text, lambda secret, _: secret if _REFERENCE.fullmatch(secret) else GONE)


def _kept_setting(_: str, text: str, *, secret: bool) -> str:
    if _REFERENCE.fullmatch(text):
        return text
    if secret and text:
        return GONE
    return redact_text(_kept_url(text))


def _at_secrets(text: str, put: Callable[[str, str], str]) -> str:
    """The URL with `put(secret, url)` in place of its password, token and secret query fields."""
    if "://" not in text:
        return text
    pieces = []
    for piece in text.split("::"):
        found = _URL.fullmatch(piece)
        pieces.append(piece if found is None else _piece_at_secrets(found, put))
    return "::".join(pieces)


def _piece_at_secrets(found: re.Match[str], put: Callable[[str, str], str]) -> str:
    url = found[0]
    user = ""
    if found["user"] is not None:
        name, colon, password = found["user"].partition(":")
        if colon:
            user = f"{name}:{put(password, url) if password else ''}@"
        else:
            user = f"{name if _is_name(found) else put(name, url)}@"
    query = ""
    if found["query"]:
        fields = [field.partition("=") for field in found["query"][1:].split("&")]
        query = "?" + "&".join(
            f"{n}{eq}{put(v, url) if v and is_secret_name(n) else v}" for n, eq, v in fields
        )
    return found["head"] + user + found["place"] + query + (found["rest"] or "")


def _is_name(found: re.Match[str]) -> bool:
    """Whether what stands before the `@` is no secret."""
    user, scheme = found["user"] or "", found["head"][:-3].lower()
    return bool(user) and ":" not in user and scheme in _NAMES


def _value(field: str, secret: str, url: str, variables: Mapping[str, str]) -> str:
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
