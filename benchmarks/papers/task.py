"""`jobs/cifar.py` with images over HTTP: each fetched when it is needed, or read once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar import Cifar

from benchmarks.papers.serving import Local, Remote, together
from raycloud import Source, Splits

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

HELD_OUT = 1000


class Fetched(Cifar):
    """Each image is fetched and decoded whenever a step needs it.

    Args:
        url: Of the server.
        held_out: The file of the images held out.
    """

    def __init__(self, *, url: str, held_out: str, **shape: Any) -> None:
        super().__init__(**shape)
        self.url, self.held_out = url, Path(held_out)

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - the URL is a setting
        """From the server, and from the file."""
        return Splits(train=Remote(self.url), held_out=Local(self.held_out, HELD_OUT))

    def batch(self, samples: Any, rng: np.random.Generator | None) -> dict[str, Tensor]:
        """Moved and mirrored, as `jobs/cifar.py` does."""
        return super().batch(together(samples), rng)


class Kept(Fetched):
    """They are read once, decoded, and kept as blocks; those of a class are spread evenly."""

    def data(self, path: str | None) -> Splits:
        """The server's file, through the pipeline."""
        columns = (self.image, self.label)
        train = Source(
            path=f"{self.url}/train.parquet", format="parquet", columns=columns, required=columns,
            types={self.label: "int64"},
        )  # fmt: skip
        return Splits(train=train, held_out=super().data(path).held_out)
