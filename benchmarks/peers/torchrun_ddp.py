"""One worker of `torchrun --nproc-per-node 2 -m benchmarks.peers.torchrun_ddp`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.loop import DDP_SETTINGS, train


def main() -> None:
    """Join the others that torchrun started, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    train(
        lambda model: DistributedDataParallel(model, **DDP_SETTINGS),
        rank=dist.get_rank(),
        steps=asked.steps,
        marks=asked.marks,
    )
    dist.destroy_process_group()
    # Gloo's threads may still let go of tensors while the interpreter ends, which now and then
    # aborts the process (pytorch/pytorch#179291). All is measured and written: end without that.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
