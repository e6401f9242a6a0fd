"""Classes of labelled rows: numbers as they are, or names in the order of a list or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raycloud.errors import DataError


def names_of(labels: Sequence[str] | str | None) -> tuple[str, ...]:
    """The names of the classes, class 0 first; none where rows have numbers.

    Args:
        labels: The names, or a file of them, one a line; None: rows have numbers.
    """
    if not isinstance(labels, str):
        return tuple(labels or ())
    try:
        lines = Path(labels).read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"the names of the classes, settings.labels {labels!r}, cannot be read: "
            f"{error.strerror}",
            hint="give a list of names, or a file with a name a line that each node sees; of "
            "folders that is what `ls FOLDER > FILE` writes",
        ) from error
    return tuple(line.strip() for line in lines if line.strip())


def numbers_of(labels: Sequence[Any], names: tuple[str, ...], classes: int) -> np.ndarray:
    """The labels of rows as int64, 0 to `classes` - 1.

    Raises:
        ValueError: A label is no class; with what it is.
    """
    if names:
        places = {name: place for place, name in enumerate(names)}
        if unknown := [label for label in labels if label not in places]:
            raise ValueError(f"label {unknown[0]!r} is not in settings.labels")
        return np.array([places[label] for label in labels], np.int64)
    numbers = np.asarray(labels)
    if len(wrong := numbers[~((numbers >= 0) & (numbers < classes))]):
        raise ValueError(f"label {wrong[0]} is not one of 0 to {classes - 1}")
    return numbers.astype(np.int64)
