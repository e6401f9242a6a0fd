"""How long the driver is kept from its work while a checkpoint of many parts is published.

    python -m benchmarks.publishing

The store is an fsspec file system in memory of which every call takes 50 ms, as an object store's
may; 1,000 files are removed in one call, as S3 and its like do. Three checkpoints of 100 parts are
published and one is kept, so the last two remove one each. Printed: the longest that the driver's
thread was inside a call, and the seconds until the checkpoint was published, and the old one gone.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

from raycloud.checkpoint import LimitedStore, Store, encode, open_store, split_names
from raycloud.checkpoint.payload import write_part
from raycloud.clock import SystemClock
from raycloud.commands import Publish
from raycloud.events import CheckpointPublished
from raycloud.on_ray.checkpoints import CheckpointPublisher
from raycloud.spec import Job, load_job

PARTS, CALL_S, KEEP = 100, 0.05, 1
BLOCKED_S, DONE_S = 0.02, 2.0  # the limits
_ROOT = Path(__file__).parents[1]
_CLOCK = SystemClock()


class Slow(MemoryFileSystem):
    """A file system in memory whose calls take `CALL_S` once `asked` is set."""

    protocol = "slow"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
    asked = False
    calls = 0

    def __getattribute__(self, name: str) -> Any:
        """The calls of a file system, each slowed."""
        found = super().__getattribute__(name)
        if name in {
            "cat_file",
            "find",
            "info",
            "isfile",
            "makedirs",
            "mv",
            "open",
            "rm",
            "rm_file",
        }:
            return self._slowed(found)
        return found

    def _slowed(self, call: Any) -> Any:
        def slowed(*args: Any, **options: Any) -> Any:
            kind = type(self)
            if kind.asked and not getattr(_INSIDE, "one", False):
                kind.calls += 1
                threading.Event().wait(CALL_S)
            outer, _INSIDE.one = getattr(_INSIDE, "one", False), True
            try:
                return call(*args, **options)
            finally:
                _INSIDE.one = outer

        return slowed


_INSIDE = threading.local()  # a call that makes others is one call


def _written(store: Store, step: int) -> Publish:
    """What the members report once their parts are there."""
    tensors = {f"parameter/{n}": torch.full((100,), float(step)) for n in range(4 * PARTS)}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    values = encode({"epoch": 0, "offset": 0, "generation": 0, "fuse": 1, "pass_size": 1})
    parts = {}
    for rank, names in enumerate(split_names(sizes, PARTS)):
        mine = {name: tensors[name] for name in names}
        record = write_part(store, step=step, rank=rank, parts=PARTS, tensors=mine)
        parts[rank, 0] = {"rank": rank, "record": record, "values": values}
    return Publish(step=step, parts=parts)


def measure(store: Store, job: Job) -> tuple[float, float]:
    """The longest call of the driver's, and the seconds until all is done, of the last one."""
    session: Any = SimpleNamespace(clock=_CLOCK, written=job, job=job, checkpoints="slow://run")
    publishing = CheckpointPublisher(LimitedStore(store), session)
    blocked_s = done_s = 0.0
    for step in (1, 2, 3):
        command = _written(store, step)
        Slow.asked, Slow.calls = True, 0
        began_s = before_s = _CLOCK.monotonic_s()
        publishing.publish(command, samples=1000, ledger={})
        blocked_s = max(blocked_s, _CLOCK.monotonic_s() - before_s)
        published = False
        while not published or len(_there()) > KEEP:
            threading.Event().wait(0.005)  # the driver is elsewhere
            before_s = _CLOCK.monotonic_s()
            published |= any(isinstance(e, CheckpointPublished) for e in publishing.poll())
            blocked_s = max(blocked_s, _CLOCK.monotonic_s() - before_s)
        done_s = _CLOCK.monotonic_s() - began_s
        Slow.asked = False
    publishing.close(10.0)
    return blocked_s, done_s


def _there() -> set[str]:
    """The directories of checkpoints that are there."""
    return {path.split("/")[2] for path in list(Slow.store) if "/step-" in path}


def main() -> int:
    """Measure, print, and end with 1 where a limit is not held."""
    register_implementation("slow", Slow, clobber=True)
    job = load_job(_ROOT / "jobs/gpt.yaml", ["checkpoint.keep=1"])
    blocked_s, done_s = measure(open_store("slow://run"), job)
    print(f"{PARTS} parts, {CALL_S * 1e3:.0f} ms a call, {Slow.calls} calls for the last one")
    print(f"driver blocked  {blocked_s * 1e3:6.1f} ms   limit {BLOCKED_S * 1e3:.0f} ms")
    print(f"done            {done_s:6.2f} s    limit {DONE_S:.0f} s")
    return int(blocked_s > BLOCKED_S or done_s > DONE_S)


if __name__ == "__main__":
    sys.exit(main())
