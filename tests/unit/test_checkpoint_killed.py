"""A real process that ends at every system call which changes the disk, without any tidying up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raycloud.checkpoint import latest, load, open_store, retain, steps, verify
from raycloud.checkpoint.payload import load_tensors
from tests.checkpoints import drafts

# One process that forks a child per point: starting torch once per point would take minutes. A
# child counts the calls that change the disk and ends itself at its own, before or halfway through.
SCRIPT = """
import os, sys
from pathlib import Path

import torch

from raycloud.checkpoint import Manifest, PartRecord, open_store, publish, retain
from raycloud.checkpoint.payload import write_part

torch.set_num_threads(1)


def save(store, step):
    parts = [
        write_part(store, step=step, rank=rank, parts=2,
                   tensors={f"{rank}.weight": torch.arange(300_000.0) * step + rank})
        for rank in range(2)
    ]
    publish(store, Manifest(
        step=step, epoch=0, offset=0, generation=0, samples_per_epoch=1, job={}, values={},
        ledger={}, parts=tuple(map(PartRecord.parse, parts)), raycloud_version="0",
        torch_version="0"))
    retain(store, 1, newest=step)


def arm(fatal):
    count = 0

    def before(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == fatal:
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os._exit(9)
            return real(*args, **kwargs)

        setattr(module, name, call)

    for name in ("open", "write", "fsync", "close"):
        before(os, name)
    for name in ("replace", "unlink", "rmdir", "mkdir"):
        before(Path, name)


def child(root, fatal):
    process = os.fork()
    if process == 0:
        arm(fatal)
        save(open_store(root), 200)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


fatal = 1
while True:
    root = Path(sys.argv[1]) / str(fatal)
    save(open_store(root), 100)
    code = child(root, fatal)
    if code == 0:
        break
    assert code == 9, code
    fatal += 1
print(fatal)
"""


@pytest.mark.timeout(120)
def test_a_killed_process_leaves_the_previous_or_the_new_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert points > 30
    seen = []
    left = 0
    for fatal in range(1, points + 1):
        store = open_store(tmp_path / str(fatal))
        for step in steps(store):
            verify(store, load(store, step))
        found = latest(store)
        assert found.skipped == ()
        assert found.manifest is not None
        step = found.manifest.step
        seen.append(step)
        left += len(drafts(store))
        tensors = load_tensors(store, found.manifest)
        assert len(tensors) == 2
        for rank in range(2):
            assert torch.equal(tensors[f"{rank}.weight"], torch.arange(300_000.0) * step + rank)
        retain(store, 1)
        assert steps(store) == [step]
    assert seen == sorted(seen)
    assert set(seen) == {100, 200}
    assert left > 10  # the killed ones did not tidy up, or this test would show nothing
