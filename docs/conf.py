"""How the pages become a site: `make docs`, where warnings are errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)

project = "raycloud"
author = "The raycloud authors"
project_copyright = author
(release,) = VERSION.findall((DOCS.parent / "raycloud/__init__.py").read_text(encoding="utf-8"))
version = release

extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["ports/**", "examples/**"]
nitpicky = True

myst_heading_anchors = 3  # a heading is linked to as on any forge: `concepts.md#the-words`

html_theme = "furo"
html_title = f"raycloud {release}"
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Pages that stand above this folder, where forges look for them, and the pages that show them here.
ABOVE = {
    "benchmarks": "BENCHMARKS.md",
    "changes": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
SHOWN = {name: f"{page}.md" for page, name in ABOVE.items()} | {"README.md": "index.md"}
LINK = re.compile(r"\]\(([^)#\s]+)")


def _bring_in(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the text of a page from above in the place of its stub, and lead all links to pages."""
    at = DOCS / page
    if page in ABOVE:
        at = DOCS.parent / ABOVE[page]
        app.env.note_dependency(str(at))
        text[0] = at.read_text(encoding="utf-8")

    def led(link: re.Match[str]) -> str:
        target = (at.parent / link[1]).resolve()
        if "://" in link[1] or not target.is_relative_to(DOCS.parent):
            return link[0]
        if target.parent == DOCS.parent and target.name in SHOWN:
            target = DOCS / SHOWN[target.name]
        return f"]({os.path.relpath(target, (DOCS / page).parent)}"

    text[0] = LINK.sub(led, text[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Bring pages in; the one language here that Pygments does not know is shown as it is."""
    app.connect("source-read", _bring_in)
    app.add_lexer("mermaid", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
