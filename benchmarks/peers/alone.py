"""One node that trains alone: what it could give if exchanging cost nothing.

Forward, backward and an optimizer step on its own share of each step, over and over; nothing is
waited for. It notes its own samples: the limit is the sum over the nodes.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.peers.course import add_course, parse
from benchmarks.peers.dense import Dense, train

if TYPE_CHECKING:
    from torch import nn


def main() -> None:
    """Train alone, on the samples of worker `rank` of `world`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_course(parser)
    course = parse(parser.parse_args())
    train(Dense(course=course, rank=0, world=1, wrap=_as_it_is))


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


if __name__ == "__main__":
    main()
