"""Addresses and messages without the credentials that a URL may carry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import parse_qsl, quote, unquote, unquote_plus

GONE = "[redacted]"

_HEAD = re.compile(r"^(?P<scheme>[a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# user:password@, also where the password holds a slash that should have been percent-encoded
_USER = re.compile(
    r"(?P<head>[a-z][a-z0-9+.-]*://)(?:[^\s/?#]*|[^\s/@?#:]*:(?!\d+/)[^\s@?#]*)@", re.I
)
_SECRET = re.compile(
    r"pass(?:word|wd|phrase)|secret|token|signature|credential|api[_-]?key|access[_-]?key|^sig$|^key$",
    re.I,
)
_SHORT = 3  # a shorter secret stands in too many words


def scheme_of(url: str) -> str:
    """What stands before `://`, in small letters; empty for a path.

    >>> scheme_of("S3://bucket"), scheme_of("/data/a")
    ('s3', '')
    """
    found = _HEAD.match(url)
    return found["scheme"].lower() if found else ""


def plain(url: str) -> str:
    """The URL without user and password, and with secrets in its query replaced.

    >>> plain("s3://me:hun/ter2@bucket/a"), plain("https://host/a?id=1&token=abc")
    ('s3://bucket/a', 'https://host/a?id=1&token=[redacted]')
    """
    if not scheme_of(url):
        return url
    place, mark, query = _USER.sub(r"\g<head>", url).partition("?")
    fields = [field.partition("=") for field in query.split("&")] if query else []
    kept = (f"{n}{eq}{GONE if eq and _SECRET.search(n) else v}" for n, eq, v in fields)
    return place + mark + "&".join(kept)


def hushed(text: str, urls: Iterable[str]) -> str:
    """The text, with nothing of what these URLs keep secret.

    >>> hushed("the key hunter2 of s3://me:hunter2@bucket/a is wrong", ["s3://me:hunter2@bucket/a"])
    'the key [redacted] of s3://bucket/a is wrong'
    """
    for url in urls:
        if scheme_of(url):
            text = text.replace(url, plain(url))
            for secret in _secrets(url):
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", GONE, text)
    return _USER.sub(rf"\g<head>{GONE}@", text)


def _secrets(url: str) -> Iterator[str]:
    found = _USER.match(url)
    user, _, password = found[0].partition("://")[2][:-1].partition(":") if found else ("", "", "")
    query = parse_qsl(url.partition("?")[2], keep_blank_values=True)
    values = [password, user, *(value for name, value in query if _SECRET.search(name))]
    for value in values:
        for spelled in (value, unquote(value), unquote_plus(value), quote(value, safe="")):
            if len(spelled) >= _SHORT:
                yield spelled
