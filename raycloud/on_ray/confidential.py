"""What a process beside the members logs: to its own stderr, which Ray keeps, without secrets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from raycloud.redact import know, redact_text
from raycloud.spec import Environment
from raycloud.spec.secrets import secrets_of

if TYPE_CHECKING:
    from raycloud.spec import Job


class _Filtered(logging.Formatter):
    """A formatter whose text has no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


_HANDLER = logging.StreamHandler()
_HANDLER.setFormatter(_Filtered("%(levelname)s %(name)s: %(message)s"))


def keep_confidential(job: Job) -> None:
    """Know the job's secrets in this process, and take them out of what is logged here.

    Members have a journal instead. What the task prints by itself is not filtered.
    """
    know(Environment.from_process().secrets | secrets_of(job))
    logging.getLogger().addHandler(_HANDLER)  # once, however often it is added
