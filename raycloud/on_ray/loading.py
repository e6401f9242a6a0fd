"""Loading what computes: most of what a process makes by it stays for good."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Look for no garbage while much is loaded, nor ever again in what is there by then.

    Loading torch makes some hundred thousand objects, which are looked through 500 times: a sixth
    of its processor time, on a node of little more than a third of a core half a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
