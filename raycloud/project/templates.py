"""The templates: files with `{{name}}` where the project's name goes, packaged beside the code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from raycloud.spec.job import Job
from raycloud.spec.schema import render_schema

_PLACE = "{{name}}"
_FILES = {
    "task.py": "task.py.in",
    "job.yaml": "job.yaml.in",
    "job.schema.json": None,  # from the code, so that it is of the installed version
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A kind of project.

    Attributes:
        name: What it is asked for by.
        about: What it trains, in a few words.
    """

    name: str
    about: str


TEMPLATES = {
    template.name: template
    for template in (
        Template(name="classifier", about="a data set that can be indexed, and three classes"),
        Template(name="text", about="files of text, prepared once, and the next byte"),
    )
}


def files_of(template: Template, name: str) -> dict[str, str]:
    """The files of a project called `name`: file name to text."""
    folder = files("raycloud.project") / "files" / template.name
    return {
        file: render_schema(Job)
        if source is None
        else (folder / source).read_text(encoding="utf-8").replace(_PLACE, name)
        for file, source in _FILES.items()
    }
