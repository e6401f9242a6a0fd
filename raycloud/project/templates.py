"""Templates of a new project, packaged beside the code, and how they are written to a directory.

A template is a folder of files with `{{name}}` where the project's name goes. All of its files are
written, or none; nothing is overwritten.
"""

from __future__ import annotations

import os.path
import re
from importlib.resources import files
from pathlib import Path

from raycloud.errors import JobError
from raycloud.spec.job import Job
from raycloud.spec.schema import render_schema

_PLACE = "{{name}}"
_LONGEST = 63  # letters of a job's name
_FILES = {
    "task.py": "task.py.in",
    "job.yaml": "job.yaml.in",
    "job.schema.json": None,  # from the code, so that it is of the installed version
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
}


TEMPLATES = {
    "classifier": "a data set that can be indexed, and three classes",
    "text": "files of text, prepared once, and the next byte",
}
"""What each trains, in a few words."""


def files_of(template: str, name: str) -> dict[str, str]:
    """The files of a project called `name`: file name to text."""
    folder = files("raycloud.project") / "files" / template
    return {
        file: render_schema(Job)
        if source is None
        else (folder / source).read_text(encoding="utf-8").replace(_PLACE, name)
        for file, source in _FILES.items()
    }


def name_for(directory: Path, template: str) -> str:
    """The job's name in a directory: the directory's, as far as a name can hold it.

    >>> name_for(Path("/w/My Model (2)"), "text")
    'my-model-2'
    >>> name_for(Path("/"), "text")
    'text'
    """
    plain = re.sub(r"[^a-z0-9_-]+", "-", directory.name.lower()).strip("-_")
    return plain[:_LONGEST] or template


def write_project(directory: Path, template: str) -> list[Path]:
    """Write the files of a template into a directory, which is made where it is missing.

    Returns:
        What was written, in the order in which one reads it.

    Raises:
        JobError: One of the files is there already, or the directory cannot be written; what was
            written until then is removed again.
    """
    files = files_of(template, name_for(directory.absolute(), template))
    if taken := [name for name in files if os.path.lexists(directory / name)]:
        raise _refused(directory, f"holds {', '.join(taken)} already")
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                written.append(directory / name)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise _refused(directory, f"cannot be written: {error.strerror}") from error
    return written


def _refused(directory: Path, problem: str) -> JobError:
    return JobError(
        f"{directory} {problem}", hint="name another directory: `raycloud init NEW_DIRECTORY`"
    )
