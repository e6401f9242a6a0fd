"""What a member's process loads before it begins, and how."""

from __future__ import annotations

import gc
import subprocess
import sys

from raycloud.on_ray.actors import loading

BEGUN = """
import sys
import raycloud.on_ray.provider
import raycloud.worker.member
print(*{"pyarrow", "pandas", "fsspec", "ray.data", "torch._dynamo"}.intersection(sys.modules))
"""


def test_garbage_is_looked_for_again_once_all_is_loaded() -> None:
    try:
        with loading():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_reads_blocks_is_not_loaded_before_there_are_some() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BEGUN], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
