"""The peer that welcomes the others of Hivemind: it keeps the hash table and trains nothing."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import hivemind


def main() -> None:
    """Write where it is reached, then stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--welcome", type=Path, required=True, help="gets its addresses")
    asked = parser.parse_args()
    address = f"/ip4/{os.environ['TESTBED_ADDRESS']}/tcp/{asked.port}"
    dht = hivemind.DHT(host_maddrs=[address], start=True)
    draft = asked.welcome.with_suffix(".draft")
    draft.write_text("\n".join(str(one) for one in dht.get_visible_maddrs()))
    draft.rename(asked.welcome)
    signal.pause()


if __name__ == "__main__":
    main()
