"""The filter between what happened and what is written down: no secret reaches a run's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "[redacted]"

_SECRET_WORD = (
    r"(?:[a-z0-9_-]*(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credentials?)[a-z0-9_-]*|(?:[a-z0-9]+[_-])*token|sig|signature|x-amz-signature)"
)
_SECRET_NAME = re.compile(_SECRET_WORD, re.IGNORECASE)

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # scheme://user:password@host, and scheme://token@host
    (
        re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]*://)[^\s/@?#\"']+@", re.IGNORECASE),
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
            r"(?!\[redacted\])[^\s\"'&,;)}]+(?P=q)",
            re.IGNORECASE,
        ),
        rf"\g<keep>\g<q>{GONE}\g<q>",
    ),
    # keys with a known shape: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, Google, JWT
    (
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        GONE,
    ),
)


def redact_text(text: str) -> str:
    """The text without URL credentials and without what looks like a key, token or password.

    >>> redact_text("cannot read s3://me:hunter2@host/data?token=abc")
    'cannot read s3://[redacted]@host/data?token=[redacted]'
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact(value: Any) -> Any:
    """The same JSON-ready value, every text in it filtered, keys of mappings included.

    A text under a name such as `password` or `api_key` is replaced whole; numbers never are.
    """
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {redact(name): _redact_field(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return value


def _redact_field(name: Any, value: Any) -> Any:
    if isinstance(name, str) and isinstance(value, str) and _SECRET_NAME.fullmatch(name):
        return GONE
    return redact(value)
