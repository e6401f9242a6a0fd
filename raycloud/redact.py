"""The filter between what happened and what people read: no secret reaches a file or a screen.

Two things are taken out of a text: what has the shape of a secret (credentials in a URL, a value
under a secret's name, keys of a known form), and what this process knows to be one: the values that
`know` was told, wherever they turn up. Knowing is the process's, not an argument: an error may come
from any depth, and a filter that has to be handed on is one that is forgotten somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, unquote_plus

GONE = "[redacted]"

Record = TypeVar("Record")

# Anything may stand in a log, so no pattern here takes more time than a text's length is worth: a
# word is looked into once and then taken whole, and a scheme is known by its last letter.
_SECRET_WORD = (
    r"(?:(?=[a-z0-9_-]*(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key"
    r"|private[_-]?key|credential))[a-z0-9_-]++"
    r"|(?:[a-z0-9]+[_-])*token|sig|signature|x-amz-signature)"
)
# Of a vocabulary, not of a door: `pad_token: <pad>` is no secret.
_VOCABULARY = r"(?!(?:bos|eos|pad|unk|mask|sep|cls|start|end|stop|special|image)[_-]token)"
_SECRET_NAME = re.compile(_VOCABULARY + _SECRET_WORD, re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"{_SECRET_WORD}|PGPASSWORD|[a-z0-9_]+_(?:pwd|pat)", re.IGNORECASE)

# scheme://user:password@, also where the password holds a slash that should have been encoded
_USER = re.compile(
    r"[a-z0-9+.-]://"
    r"(?P<user>[^\s/?#\"']*|[^\s/@?#:]*:(?!\d+/)(?:(?!://)[^\s@?#\"'])*)@",
    re.IGNORECASE,
)
_QUERY = re.compile(r"[?&;](?P<name>[\w.-]+)=(?P<value>[^\s&;#\"']*)")

_NAMED = r"\$\{[A-Za-z_]\w*\}"  # the name of a secret, which is none

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # scheme://user:password@host, and scheme://token@host; not scheme://user:${NAME}@host
    (
        re.compile(
            rf"(?P<keep>[a-z0-9+.-]://)(?!(?:[^\s/@?#\"':]*:)?{_NAMED}@)[^\s/@?#\"']+@",
            re.IGNORECASE,
        ),
        rf"\g<keep>{GONE}@",
    ),
    # -----BEGIN ... PRIVATE KEY----- to its end, or to the end of the text
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
        ),
        GONE,
    ),
    # Authorization: Bearer ...
    (
        re.compile(r"(?P<keep>\b(?:bearer|basic) +)[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE),
        rf"\g<keep>{GONE}",
    ),
    # token=..., "password": "...", ?X-Amz-Signature=...
    (
        re.compile(
            rf"(?P<keep>(?<![a-z0-9_-]){_SECRET_WORD}(?:=|[\"'] *[:=] *))(?P<q>[\"']?)"
            rf"(?!\[redacted\]|{_NAMED})[^\s\"'&,;)}}]+(?P=q)",
            re.IGNORECASE,
        ),
        rf"\g<keep>\g<q>{GONE}\g<q>",
    ),
    # keys with a known shape: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, Google, JWT
    (
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
            r"|eyJ[\w-]{8,1024}+\.[\w-]{8,}+\.[\w-]*)"
        ),
        GONE,
    ),
)

_SHORTEST = 4  # a shorter value stands in too many words
_PART_OF_A_WORD = 8  # from here on a value is taken out of the middle of a word, too
_SHORTEST_VARIABLE = 6

_known: set[str] = set()
_known_pattern: list[re.Pattern[str]] = []  # of all of them; empty while none is known


def know(values: Iterable[str]) -> None:
    """Take these values out of every text from now on, in this process.

    Values of fewer than 4 letters are left: they stand in too many words. Those of fewer than 8 are
    taken out where they stand alone.
    """
    fresh = {value for value in values if len(value) >= _SHORTEST and value not in GONE} - _known
    if not fresh:
        return
    _known.update(fresh)
    parts = [
        re.escape(value) if len(value) >= _PART_OF_A_WORD else rf"(?<!\w){re.escape(value)}(?!\w)"
        for value in sorted(_known, key=len, reverse=True)
    ]
    _known_pattern[:] = [re.compile("|".join(parts))]


def secrets_among(variables: Mapping[str, str]) -> set[str]:
    """The values of environment variables that are secrets: by their name, or inside a URL.

    The path of a file that holds a secret is none.

    >>> sorted(secrets_among({"DB": "pg://me:hunter22@h/d", "HF_TOKEN": "abcdef", "SH": "/bin"}))
    ['abcdef', 'hunter22']
    """
    found: set[str] = set()
    for name, value in variables.items():
        if _SECRET_VARIABLE.fullmatch(name) and _is_secret(value):
            found.add(value)
        found.update(secrets_in(value))
    return found


def secrets_in(text: str) -> Iterator[str]:
    """What the URLs in a text carry: passwords, tokens, secret fields of the query; each spelling.

    >>> sorted(set(secrets_in("s3://me:hun%2Fter2@bucket/a?token=abcd")))
    ['abcd', 'hun%2Fter2', 'hun/ter2']
    """
    if "://" not in text:
        return
    values = []
    for found in _USER.finditer(text):
        user, colon, password = found["user"].partition(":")
        values.append(password if colon else user)
    values += [found["value"] for found in _QUERY.finditer(text) if is_secret_name(found["name"])]
    for value in values:
        if value and GONE not in value:
            yield from {value, unquote(value), unquote_plus(value), quote(unquote(value), safe="")}


def is_secret_name(name: str) -> bool:
    """Whether what stands under this name is a secret, as under `password` or `HF_TOKEN`."""
    return _SECRET_NAME.fullmatch(name) is not None


def redact_text(text: str) -> str:
    """The text without what is known, URL credentials, and what looks like a key or password.

    >>> redact_text("cannot read s3://me:hunter2@host/data?token=abc")
    'cannot read s3://[redacted]@host/data?token=[redacted]'
    """
    for pattern in _known_pattern:
        text = pattern.sub(GONE, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact(value: Any) -> Any:
    """The same JSON-ready value, every text in it filtered, keys of mappings included.

    A text under a name such as `password` or `api_key` is replaced whole, as is every text in a
    mapping or list there; numbers never are.
    """
    return _filtered(value, secret=False)


def redacted(record: Record) -> Record:
    """A frozen record, such as an event, with every text in its fields filtered."""
    changed: dict[str, Any] = {}
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, str | Mapping | tuple):
            filtered = redact(value)
            if filtered != value:
                changed[field.name] = filtered
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def _filtered(value: Any, *, secret: bool) -> Any:
    if isinstance(value, str):
        return GONE if secret else redact_text(value)
    if isinstance(value, Mapping):
        return {
            redact(name): _filtered(inner, secret=secret or is_secret_name(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        new = [_filtered(inner, secret=secret) for inner in value]
        return tuple(new) if isinstance(value, tuple) else new
    return value


def _is_secret(value: str) -> bool:
    if len(value) < _SHORTEST_VARIABLE or (value.isdigit() and len(value) < _PART_OF_A_WORD):
        return False
    if not value.startswith(("/", "~", "./")):
        return True
    try:
        return not Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path
        return True
