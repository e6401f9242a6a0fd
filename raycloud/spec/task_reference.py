"""The form of `task`: a class in a file, or in an importable module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from raycloud.spec.yaml_text import is_unicode

EXAMPLE = "gpt.py:Gpt"

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLASS = re.compile(r"[^\W\d]\w*(\.([^\W\d]\w*|<locals>))*")


@dataclass(frozen=True, slots=True)
class TaskReference:
    """Where the class of a task is found.

    Attributes:
        place: A Python file (ends in `.py`) or a dotted module.
        qualname: The class in it; dots for a class within a class.
    """

    place: str
    qualname: str

    @property
    def file(self) -> Path | None:
        """The file, if the reference names one; `None` for a module."""
        return Path(self.place) if self.place.endswith(".py") else None

    @property
    def portable(self) -> str:
        """The reference without the folders of its file: what stays when a project is moved."""
        file = self.file
        return str(self) if file is None else f"{file.name}:{self.qualname}"

    def __str__(self) -> str:
        """As it stands in a job file."""
        return f"{self.place}:{self.qualname}"

    @classmethod
    def of_class(cls, kind: type) -> TaskReference:
        """Where a class says it is defined.

        >>> str(TaskReference.of_class(TaskReference))
        'raycloud.spec.task_reference:TaskReference'
        """
        return cls(kind.__module__, kind.__qualname__)

    @classmethod
    def parse(cls, text: str) -> TaskReference:
        """Split `path/to/file.py:Class` or `package.module:Class`.

        >>> TaskReference.parse("models/gpt.py:Gpt")
        TaskReference(place='models/gpt.py', qualname='Gpt')

        Raises:
            ValueError: With two arguments: what is wrong, and what would do.
        """
        place, colon, qualname = text.rpartition(":")
        if not colon or not place or not qualname:
            at = text.strip(":") or EXAMPLE.partition(":")[0]
            raise ValueError(
                "names no file or module and class",
                f"write `{at}:` and the name of the class, as in {EXAMPLE}",
            )
        if not _CLASS.fullmatch(qualname):
            raise ValueError(
                f"{qualname!r} is not the name of a Python class",
                f"after the last colon stands the class alone, as in {EXAMPLE}",
            )
        reference = cls(place, qualname)
        if reference.file is None and not _MODULE.fullmatch(place):
            raise ValueError(
                f"{place!r} is neither a .py file nor a dotted module",
                f"write a file as in {EXAMPLE}, or a module as in package.module:Gpt",
            )
        if "\0" in place or "\n" in place or not is_unicode(place):
            problem = "holds a character that a path cannot"
            raise ValueError(problem, f"write the file's path, as in {EXAMPLE}")
        return reference
