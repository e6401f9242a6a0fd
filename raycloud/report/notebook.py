"""The summary of a run as a piece of HTML, for notebooks."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.report.terminal import page

if TYPE_CHECKING:
    from raycloud.report.summary import Summary


def summary_html(summary: Summary, directory: Path | None = None) -> str:
    """The summary as HTML without scripts or outside addresses; every text in it is escaped."""
    content = page(summary, directory)
    rows = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in content.rows)
    parts = [f"<b>{escape(content.title)}</b>", f"<table>{rows}</table>"]
    if content.predicted:
        cells = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in content.predicted
        )
        head = "<tr><th></th><th>predicted</th><th>measured</th><th></th></tr>"
        parts.append(f"<table>{head}{cells}</table>")
    if content.sample:
        parts.append(f"<pre>{escape(content.sample)}</pre>")
    return f"<div>{''.join(parts)}</div>"
