"""Numbers and texts as people read them."""
# ruff: noqa: PLR2004 - where a figure changes its form is a number, and this is the place for it

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raycloud.redact import redact_text

_BARS = "▁▂▃▄▅▆▇█"


def byte_count(count: float) -> str:
    """Bytes in decimal units.

    >>> byte_count(999), byte_count(48_210_000), byte_count(3e12)
    ('999 B', '48.2 MB', '3.0 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """A span of time.

    >>> duration(0.25), duration(6.13), duration(86), duration(3725)
    ('0.25 s', '6.1 s', '1:26', '1:02:05')
    """
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def figure(value: float | None) -> str:
    """A number at four significant digits, or a dash where it is not known.

    >>> figure(2.34567), figure(12345.6), figure(0.000123), figure(7.0), figure(None)
    ('2.346', '12346', '0.000123', '7', '-')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(part: float) -> str:
    """A fraction as a percentage.

    >>> percent(0.913), percent(0.004)
    ('91%', '0.4%')
    """
    return f"{100 * part:.0f}%" if part >= 0.0095 or part == 0 else f"{100 * part:.1f}%"


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "worker"), counted(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def finite(value: Any) -> Any:
    """Plain values at any depth, with None for numbers that are not finite: JSON has none.

    >>> finite({"loss": [1.0, math.nan], "steps": 2})
    {'loss': [1.0, None], 'steps': 2}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their dotted names; a section that is empty has none.

    >>> dict(leaves({"steps": 3, "data": {"path": None, "kinds": ["a"]}}))
    {'steps': 3, 'data.path': None, 'data.kinds': ['a']}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def row(label: str, text: str, width: int = 14) -> str:
    """An indented line: a label, and beside it a text."""
    return f"  {label:<{width}}{text}".rstrip()


def table(rows: Sequence[Sequence[str]], *, left: Sequence[bool]) -> list[str]:
    """Indented lines with columns as wide as their widest cell.

    >>> table([("id", "size"), ("a", "7")], left=(True, False))
    ['  id  size', '  a      7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = (
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(cells, widths, left, strict=True)
        )
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def sparkline(
    values: Sequence[float | None],
    *,
    width: int = 24,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """A curve in one line; each bar is the mean of its stretch, blank where nothing is finite.

    `low` and `high` are the values of the smallest and the largest bar, for curves that stand side
    by side; without them, they are those of this curve.

    >>> sparkline([4, 3, 2, 1], width=4), sparkline([4, 3], width=2, low=0, high=8)
    ('█▆▃▁', '▅▄')
    """
    if not values:
        return ""
    width = min(width, len(values))
    means: list[float | None] = []
    for bar in range(width):
        stretch = values[bar * len(values) // width : (bar + 1) * len(values) // width]
        known = [x for x in stretch if x is not None and math.isfinite(x)]
        means.append(sum(known) / len(known) if known else None)
    shown = [x for x in means if x is not None]
    low = min(shown, default=0.0) if low is None else low
    high = max(shown, default=0.0) if high is None else high
    most = len(_BARS) - 1
    scale = most / ((high - low) or 1.0)
    bars = (None if x is None else max(0, min(most, round((x - low) * scale))) for x in means)
    return "".join(" " if bar is None else _BARS[bar] for bar in bars)


def printable(text: str) -> str:
    r"""The text without control characters but line breaks: a terminal would obey them.

    >>> printable("a\x1b[31mb\tc")
    'a?[31mb    c'
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n")
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def printable_line(text: str) -> str:
    r"""`printable`, on one line.

    >>> printable_line("two\nlines")
    'two lines'
    """
    return " ".join(printable(text).split())


def cut_line(text: str, widest: int) -> str:
    """`printable_line` without secrets, of at most `widest` letters."""
    line = printable_line(redact_text(text))
    return line if len(line) <= widest else f"{line[:widest]} …"
