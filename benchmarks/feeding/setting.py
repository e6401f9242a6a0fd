"""What every section of the benchmark gets, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.feeding.floors import Verdict
    from benchmarks.feeding.images import ImageSet


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a section measures with.

    Attributes:
        images: The images.
        clicks: The CSV file of `jobs/clicks.yaml`; None where it is absent.
        environments: Where peers' environments are kept.
        repeats: How often to measure what is compared.
        quick: Whether to do as little as shows that it works.
        say: Prints a line at once.
    """

    images: ImageSet
    clicks: Path | None
    environments: Path
    repeats: int
    quick: bool
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a section found.

    Attributes:
        record: JSON-ready values.
        text: More than the verdicts, for people.
        verdicts: Its figures and how they did.
    """

    record: dict[str, Any]
    text: str
    verdicts: list[Verdict]
