"""The store that torchrun's agents meet at, in a process of its own, until it is ended.

By default one of the agents holds it, and with its node goes the rendezvous. Here it stands where
no node is special: beside them.
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore


def main() -> None:
    """Hold the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    store = TCPStore(asked.host, asked.port, is_master=True, wait_for_workers=False)
    print(f"holds {store.host}:{store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
