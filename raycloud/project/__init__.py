"""What a new project starts from: a task, a job file with its schema, a README."""

from __future__ import annotations

from raycloud.project.templates import TEMPLATES, Template, files_of, name_for, write_project

__all__ = ["TEMPLATES", "Template", "files_of", "name_for", "write_project"]
