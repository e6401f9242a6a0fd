"""Secrets, known by their shape in a file's bytes.

The redaction of what is written down (`raycloud.redact`) would rather hide too much. Here a file
that the job needs would be missing, so that only shapes stand here that nothing else has.
"""

from __future__ import annotations

import re

_SHAPES: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    (
        "a private key",
        re.compile(
            rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,8}-----[\s\S]{0,400}?[A-Za-z0-9+/]{40}"
        ),
    ),
    ("a PuTTY private key", re.compile(rb"PuTTY-User-Key-File-\d: \S")),
    ("an AWS access key", re.compile(rb"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])")),
    (
        "an AWS secret key",
        re.compile(
            rb"(?i:aws_?secret_?access_?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
        ),
    ),
    (
        "a GitHub token",
        re.compile(rb"(?<![A-Za-z0-9_])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40})"),
    ),
    ("a GitLab token", re.compile(rb"(?<![A-Za-z0-9_-])glpat-[A-Za-z0-9_-]{20}")),
    ("a Hugging Face token", re.compile(rb"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{30}")),
    (
        "an API key",
        re.compile(rb"(?<![A-Za-z0-9_-])sk-(?:proj-|ant-[a-z0-9]{2,8}-)?[A-Za-z0-9]{32}"),
    ),
    ("a Slack token", re.compile(rb"(?<![A-Za-z0-9_-])xox[abprs]-[0-9]{8}[A-Za-z0-9-]{10}")),
    ("a Google API key", re.compile(rb"(?<![A-Za-z0-9_-])AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])")),
    ("a PyPI token", re.compile(rb"(?<![A-Za-z0-9_-])pypi-AgE[A-Za-z0-9_-]{50}")),
)


def secret_in(data: bytes) -> tuple[str, int] | None:
    r"""What a file holds that looks like a secret, and in which line (from 1); or None.

    >>> secret_in(b"x = 1\nkey = 'AKIA" + b"ABCDEFGHIJKLMNOP'")
    ('an AWS access key', 2)
    """
    for reason, pattern in _SHAPES:
        if found := pattern.search(data):
            return reason, data.count(b"\n", 0, found.start()) + 1
    return None
