"""Code that does what no file may bring raycloud to do: the watch has to see it."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

from tests.hostile_forks import MOST_BYTES, MOST_S, Case


def _nothing(_: Path) -> None:
    pass


def _unpickle(_: Path) -> None:
    pickle.loads(pickle.dumps(Path("a")))


def _fill(_: Path) -> int:
    return len(bytearray(MOST_BYTES + 2**20))


def _wait(_: Path) -> None:
    threading.Event().wait(MOST_S * 1.1)


def _write(folder: Path) -> None:
    (folder.parent / "escaped").write_text("")


def _case(act: Any) -> Case:
    return Case(make=_nothing, open=act, error=Exception, says="")


CASES = {
    "unpickles": _case(_unpickle),
    "fills the memory": _case(_fill),
    "takes long": _case(_wait),
    "writes outside": _case(_write),
}
