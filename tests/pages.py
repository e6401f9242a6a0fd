"""The pages of the documentation, as tests read them: their words, code blocks and tables."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"

BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HEAD = re.compile(r"--- (\S+)\n\+\+\+ (\S+)\n")
NAMED = re.compile(r"# (\S+\.\w+)\n")
COMMENT = re.compile(r"\s+#.*")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block: its language, and its text from the margin.

    Attributes:
        page: The page's name, for messages.
        language: What stands behind the fence; empty for commands and drawings.
        text: What is in it.
    """

    page: str
    language: str
    text: str

    @property
    def files(self) -> dict[str, str]:
        """The files that the block is, by name.

        A block of Python or YAML is the one that its first line names, in a comment; a diff is two,
        before and after.
        """
        if self.language == "diff" and (head := HEAD.match(self.text)):
            lines = self.text[head.end() :].splitlines()
            sides = zip(head.groups(), "+-", strict=True)
            return {
                name: "".join(f"{line[1:]}\n" for line in lines if line[:1] != others)
                for name, others in sides
            }
        named = NAMED.match(self.text)
        return {named[1]: self.text} if named and self.language in {"python", "yaml"} else {}

    @property
    def commands(self) -> list[str]:
        """Its lines as commands, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [COMMENT.sub("", line).strip() for line in lines if COMMENT.sub("", line).strip()]

    @property
    def is_transcript(self) -> bool:
        """Whether it shows what a terminal did, commands behind `$`."""
        return self.language == "text" and self.text.startswith("$ ")


def pages() -> list[Path]:
    """The README and every page below docs/."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order; directives such as `{toctree}` are left out."""
    for indent, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if not language.startswith("{"):
            at_margin = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
            yield Block(page.name, language, at_margin)


def words(page: Path) -> str:
    """A page without its code blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, each as its cells; without the head.

    Raises:
        ValueError: There is no such heading, or no table below it.
    """
    text = page.read_text(encoding="utf-8")
    below = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    found = below and re.search(r"(?:^\|.*\n)+", below[1], re.MULTILINE)
    if not found:
        raise ValueError(f"{page.name}: no table below {heading!r}")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in found[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def program(path: Path, name: str) -> dict[str, object]:
    """What a Python file defines, run under a module's name; `__main__` also runs what it does."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return vars(module)
