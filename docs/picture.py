"""A few shapes, enough for the pictures in these pages: boxes, lines, arrows and words, as SVG."""

from __future__ import annotations

from html import escape

LETTER = 0.56  # of the size of the font: how wide a letter is, on the average
SIZE = 13
LINE = 17
PAPER, INK, QUIET = "#fcfcfa", "#22262b", "#6b7280"
FILL = {
    "plain": ("#eef0f2", "#9aa3ad"),
    "first": ("#dbe8f7", "#3b73b9"),
    "second": ("#fbe5d3", "#c26a22"),
    "kept": ("#dff0e0", "#3f8a49"),
    "lost": ("#f8dede", "#b94a4a"),
}


class Picture:
    """An SVG that is drawn top down; it carries its own paper, so it reads on dark pages too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """A sheet of paper; `title` is what a screen reader says."""
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(
        self, at: tuple[float, float], size: tuple[float, float], text: str, kind: str = "plain"
    ) -> None:
        """A box with its words in the middle, one line or several.

        Raises:
            ValueError: The words do not fit, or the box is not on the paper.
        """
        (x, y), (width, height), lines = at, size, text.split("\n")
        widest = max(map(len, lines)) * LETTER * SIZE
        if widest > width - 4 or len(lines) * LINE > height:
            raise ValueError(f"{text!r} does not fit into {width} x {height}")
        if x < 0 or y < 0 or x + width > self._width or y + height > self._height:
            raise ValueError(f"{text!r} is not on the paper")
        fill, edge = FILL[kind]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{edge}"/>'
        )
        top = y + height / 2 - (len(lines) - 1) * LINE / 2 + SIZE * 0.36
        for i, line in enumerate(lines):
            self.words((x + width / 2, top + i * LINE), line, anchor="middle")

    def words(
        self, at: tuple[float, float], text: str, *, anchor: str = "start", quiet: bool = False
    ) -> None:
        """Words on the paper, at their baseline."""
        self._parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" '
            f'fill="{QUIET if quiet else INK}">{escape(text, quote=False)}</text>'
        )

    def line(self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False) -> None:
        """A line from point to point, with a head at its end if it is an arrow."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        ends = ' marker-end="url(#head)"' if arrow else ""
        ends += ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<polyline points="{way}" fill="none" stroke="{QUIET}"{ends}/>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line with a head."""
        self.line(*points, arrow=True, dashed=dashed)

    def svg(self) -> str:
        """The whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} '
                f'{self._height}" width="{self._width}" height="{self._height}" role="img" '
                f'font-family="system-ui, sans-serif" font-size="{SIZE}">',
                "<!-- Drawn by docs/pictures.py: change it there. -->",
                f"<title>{escape(self._title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
                f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{QUIET}"/>'
                "</marker></defs>",
                f'<rect width="{self._width}" height="{self._height}" rx="8" fill="{PAPER}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
