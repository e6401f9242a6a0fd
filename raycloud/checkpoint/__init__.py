"""What lasts: manifest, payload, store.

A checkpoint is a directory `step-XXXXXXXX/` in a store: one safetensors file per member
(`payload`), and `manifest.json`, written last, which names every part with its size and digest
(`manifest`, `published`). A directory without a manifest does not exist to a reader. Nothing is
ever unpickled.

    write_part (every member, side by side) -> publish (once) -> retain (drops the oldest)
    latest -> load_tensors

Only `raycloud.checkpoint.payload` needs torch, so it is imported by its own name.
"""

from __future__ import annotations

from raycloud.checkpoint.manifest import Manifest, PartRecord, TensorRecord, split_names
from raycloud.checkpoint.naming import DamagedError, StoreError
from raycloud.checkpoint.published import (
    Found,
    latest,
    load,
    publish,
    retain,
    steps,
    verify,
    withdraw,
)
from raycloud.checkpoint.store import LimitedStore, Store, check_shared, marked, open_store
from raycloud.checkpoint.values import decode, encode

__all__ = [
    "DamagedError",
    "Found",
    "LimitedStore",
    "Manifest",
    "PartRecord",
    "Store",
    "StoreError",
    "TensorRecord",
    "check_shared",
    "decode",
    "encode",
    "latest",
    "load",
    "marked",
    "open_store",
    "publish",
    "retain",
    "split_names",
    "steps",
    "verify",
    "withdraw",
]
