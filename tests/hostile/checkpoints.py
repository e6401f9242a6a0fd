"""Checkpoints of someone who can write anything, digests included."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raycloud.checkpoint import open_store
from raycloud.checkpoint.naming import DamagedError
from raycloud.checkpoint.payload import load_tensors
from raycloud.checkpoint.published import latest, load, verify
from raycloud.errors import CheckpointError
from tests.checkpoints import save
from tests.hostile.jobs import Payload
from tests.hostile_forks import Case

_MANIFEST = "step-00000001/manifest.json"
_PART = "step-00000001/part-0-of-2.safetensors"
_OUTSIDE = "../outside/secret.txt"


def _load(folder: Path) -> None:
    store = open_store(folder)
    load_tensors(store, load(store, 1))


def _verify(folder: Path) -> None:
    store = open_store(folder)
    verify(store, load(store, 1))


def _made(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A sound checkpoint, then changed."""

    def make(folder: Path) -> None:
        save(open_store(folder), 1)
        change(folder)

    return make


def _signed(folder: Path, body: bytes) -> None:
    """A manifest with the right digest: whoever can write the file can compute it."""
    digest = hashlib.sha256(body).hexdigest().encode()
    content = b'{"digest": "sha256:' + digest + b'", "manifest": ' + body + b"}\n"
    (folder / _MANIFEST).write_bytes(content)


def _plain(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_bytes())["manifest"]
    return manifest


def _manifest(says: str, edit: Callable[[dict[str, Any]], Any], error: Any = DamagedError) -> Case:
    """A manifest that is edited and signed again."""

    def change(folder: Path) -> None:
        plain = _plain(folder)
        edit(plain)
        _signed(folder, json.dumps(plain).encode())

    return Case(make=_made(change), open=_load, error=error, says=says)


def _body(says: str, body: Callable[[], bytes], error: Any = DamagedError) -> Case:
    def change(folder: Path) -> None:
        _signed(folder, body())

    return Case(make=_made(change), open=_load, error=error, says=says)


def _part(says: str, content: Callable[[bytes], bytes], error: Any = DamagedError) -> Case:
    """A part with other content, and a manifest that is signed for it."""

    def change(folder: Path) -> None:
        made = content((folder / _PART).read_bytes())
        (folder / _PART).write_bytes(made)
        plain = _plain(folder)
        record = plain["parts"][0]
        record.update(bytes=len(made), sha256=hashlib.sha256(made).hexdigest())
        _signed(folder, json.dumps(plain).encode())

    return Case(make=_made(change), open=_load, error=error, says=says)


def _changed(says: str, change: Callable[[Path], Any], act: Any = _load) -> Case:
    return Case(make=_made(change), open=act, error=CheckpointError, says=says)


def _flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return change


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _torch_saved(_: bytes) -> bytes:
    import io

    out = io.BytesIO()
    torch.save({"a": Payload()}, out)
    return out.getvalue()


def _headed(header: bytes) -> Callable[[bytes], bytes]:
    return lambda content: len(header).to_bytes(8, "little") + header + content[-40:]


def _renamed(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain["parts"][0].update(file=name)


def _tensor(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def edit(plain: dict[str, Any]) -> None:
        next(iter(plain["parts"][0]["tensors"].values())).update(fields)

    return edit


def _state(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain.update(values=value)


def _sparse(path: Path, size: int = 2**40) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _nothing_sound(folder: Path) -> None:
    found = latest(open_store(folder))
    if found.manifest is None:
        raise CheckpointError("; ".join(why for _, why in found.skipped))


CASES = {
    "a pickled manifest": _changed(
        "digest", lambda f: (f / _MANIFEST).write_bytes(pickle.dumps(Payload()))
    ),
    "a pickled body, signed": _body("JSON", lambda: pickle.dumps(Payload(), protocol=0)),
    "a part that torch.load would run": _part("bytes", _torch_saved),
    "a pickled part": _part("safetensors", lambda _: pickle.dumps(Payload()).ljust(200, b".")),
    "a manifest cut short": _changed("digest", _cut(_MANIFEST)),
    "a manifest with a flipped bit": _changed("digest", _flip(_MANIFEST)),
    "a part cut short": _changed("bytes", _cut(_PART)),
    "a part with a flipped bit": _changed("digest", _flip(_PART)),
    "a part with a flipped bit, verified": _changed("digest", _flip(_PART), _verify),
    "nothing sound, looked for": _changed("digest", _flip(_PART), _nothing_sound),
    "a manifest of 1 TB": _changed("bytes", _instead(_MANIFEST, _sparse)),
    "a part of 1 TB": _changed("bytes", _instead(_PART, _sparse)),
    "a part that is a pipe": _changed("missing", _instead(_PART, os.mkfifo)),
    "a manifest that is a pipe": _changed("no checkpoint", _instead(_MANIFEST, os.mkfifo)),
    "a part that is a directory": _changed("part-0", _instead(_PART, Path.mkdir)),
    "a part that is a link outside": _changed(
        "bytes", _instead(_PART, lambda path: path.symlink_to(path.parents[1] / _OUTSIDE))
    ),
    "a part that is a link to itself": _changed(
        "part-0", _instead(_PART, lambda path: path.symlink_to(path.name))
    ),
    "a part's name that climbs": _manifest("not part", _renamed(_OUTSIDE)),
    "a part's name that is absolute": _manifest(
        "not part", _renamed("/etc/passwd"), CheckpointError
    ),
    "a part's name that climbs inside": _manifest(
        "not part", _renamed("step-00000001/../../outside/secret.txt")
    ),
    "a part of another step": _manifest("file", _renamed("step-00000002/part-0-of-2.safetensors")),
    "a manifest of tomorrow": _manifest("format", lambda p: p.update(format=99), CheckpointError),
    "names that do not belong": _manifest("Unexpected", lambda p: p.update(__class__="os.system")),
    "a step that is text": _manifest("step", lambda p: p.update(step="1")),
    "a step below zero": _manifest("step", lambda p: p.update(step=-1)),
    "another step": _manifest("parts", lambda p: p.update(step=2)),
    "parts without end": _manifest("parts", lambda p: p["parts"][0].update(parts=10**12)),
    "a tensor larger than memory": _manifest("tensors", _tensor(shape=[2**52, 2**52])),
    "a tensor of no known type": _manifest("dtype", _tensor(dtype="PICKLE")),
    "a tensor of 100 dimensions": _manifest("at most 64", _tensor(shape=[1] * 100)),
    "a size below zero": _manifest("shape", _tensor(shape=[-1, 6])),
    "a tag of an object": _manifest("tag", _state({"~object": ["os.system", "id"]})),
    "a tag among other keys": _manifest("tag", _state({"~dict": [], "a": 1})),
    "keys twice": _manifest("twice", _state({"~dict": [[1, 1], [1, 2]]})),
    "tags in tags": _body(
        "too deep", lambda: b'{"format":1,"values":' + b'{"~tuple":[' * 5000 + b"]}" * 5000 + b"}"
    ),
    "ever deeper lists": _body("JSON", lambda: b"[" * 2_000_000),
    "ever deeper state": _manifest("deeper", _state({"a": json.loads("[" * 200 + "]" * 200)})),
    "a number of a million digits": _body("JSON", lambda: b'{"format":' + b"9" * 10**6 + b"}"),
    "no number": _body("JSON", lambda: b'{"format": NaN}'),
    "ten million empty lists": _body("values", lambda: b"[" + b"[]," * 10**7 + b"1]"),
    "a million small objects": _body(
        "", lambda: b'{"format":1,"a":[' + b'{"a":0},' * 499_000 + b"1]}"
    ),
    "a header longer than the file": _part(
        "safetensors", lambda old: (2**62).to_bytes(8, "little") + old[8:]
    ),
    "a header of 64 MB": _part("bytes", _headed(b"{" + b" " * 64 * 2**20 + b"}")),
    "a header ever deeper": _part("", _headed(b"[" * 150)),
    "tensors that overlap": _part(
        "safetensors",
        _headed(
            b'{"a":{"dtype":"U8","shape":[40],"data_offsets":[0,40]},'
            b'"b":{"dtype":"U8","shape":[40],"data_offsets":[0,40]}}'
        ),
    ),
    "other tensors than the manifest says": _part(
        "other tensors", _headed(b'{"a":{"dtype":"U8","shape":[40],"data_offsets":[0,40]}}')
    ),
}
