"""What travels: the files of a working directory, checked and put into one archive.

Nothing here knows of Ray. `pack` is the way in: it looks through the directory (`survey`), leaves
out what must not travel (`names`, `contents`; `ignoring`, by what `repository` reads) and writes
the rest, the same bytes for the same files (`archive`).
"""

from __future__ import annotations

from raycloud.packing.archive import Package, pack
from raycloud.packing.survey import Left, Survey, Travelling, survey

__all__ = ["Left", "Package", "Survey", "Travelling", "pack", "survey"]
