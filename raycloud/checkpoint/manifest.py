"""What a checkpoint says about itself: `manifest.json`, format 3; formats 1 and 2 are read, too.

The file is one JSON object, `{"digest": "sha256:...", "manifest": {...}}`. The digest is over the
bytes of the inner object as they stand in the file, and what surrounds them is compared byte for
byte, so every truncation and every flipped bit is noticed, also in the digest itself.

In format 1 `values` has no `Tagged` ones. Up to format 2 a part is known by its rank alone: each
replica was one worker, and the rank its number.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raycloud.bounded import MOST_VALUES, json_value
from raycloud.checkpoint.naming import (
    check_final_name,
    damaged,
    part_name,
    step_of,
)
from raycloud.checkpoint.values import decode, encode
from raycloud.errors import CheckpointError
from raycloud.order import Position

FORMAT = 3
_KEYED = 3  # the first format that keys parts by replica and position
LARGEST_BYTES = 32 * 2**20

_OPEN = b'{"digest": "sha256:'
_MIDDLE = b'", "manifest": '
_CLOSE = b"}\n"
_BODY_AT = len(_OPEN) + 64 + len(_MIDDLE)

# Bytes per element, by the names of the safetensors format.
ELEMENT_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
LARGEST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LARGEST_PARTS = 65_536
LONGEST_TENSOR_NAME = 4096
_LARGEST_RANK = 64
_HEADER_BYTES = 128  # the metadata and the padding
_TENSOR_BYTES = 128  # the words of an entry, its type and its place
_CHARACTER_BYTES = 12  # a character outside of the basic plane, escaped
_SIZE_BYTES = 20  # a number of a shape
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**53  # above any counter or size, and exact wherever JSON numbers are doubles


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor's type, in the words of the safetensors format, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def parse(cls, value: object, where: str) -> TensorRecord:
        """From JSON values.

        Raises:
            DamagedError: A key, type or size is wrong; names the key path.
        """
        fields = _record(value, ("dtype", "shape"), where)
        dtype = _text(fields["dtype"], f"{where}.dtype")
        if dtype not in ELEMENT_BYTES:
            raise damaged(f"{where}.dtype", f"is {dtype[:40]!r}, which is unknown")
        shape = _sequence(fields["shape"], f"{where}.shape")
        if len(shape) > _LARGEST_RANK:
            raise damaged(f"{where}.shape", f"has {len(shape)} dimensions")
        sizes = tuple(_integer(size, f"{where}.shape") for size in shape)
        made = cls(dtype=dtype, shape=sizes)
        _integer(made.nbytes, f"{where} (bytes)")
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """A part of a checkpoint: its file, digest, and the tensors in it.

    Attributes:
        file: Name in the store.
        rank: Which of the parts it is, from 0.
        replica: Of which replica's worker it is.
        position: Which of that replica's workers wrote it.
        parts: How many parts the checkpoint has.
        bytes: Size of the file.
        sha256: Digest of the file, hexadecimal.
        tensors: What is in it, by qualified name.
    """

    file: str
    rank: int
    replica: int
    position: int
    parts: int
    bytes: int
    sha256: str
    tensors: Mapping[str, TensorRecord]

    def to_plain(self, *, keyed: bool = False) -> dict[str, Any]:
        """As JSON values; `parse` is the inverse. Whether `keyed` by replica and position, too."""
        return {
            "file": self.file,
            "rank": self.rank,
            **({"replica": self.replica, "position": self.position} if keyed else {}),
            "parts": self.parts,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "tensors": {name: tensor.to_plain() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def parse(cls, value: object, where: str = "part", *, keyed: bool = False) -> PartRecord:
        """From JSON values; where they are not `keyed`, the rank is the number of a replica.

        Raises:
            CheckpointError: The file name is not one a checkpoint may use.
            DamagedError: A key, type or size is wrong; names the key path.
        """
        keys = ("file", "rank", "parts", "bytes", "sha256", "tensors")
        fields = _record(value, (*keys, "replica", "position") if keyed else keys, where)
        file = _text(fields["file"], f"{where}.file")
        check_final_name(file)
        parts = _integer(fields["parts"], f"{where}.parts", least=1, most=LARGEST_PARTS)
        rank = _integer(fields["rank"], f"{where}.rank", most=parts - 1)
        step = step_of(file)
        if step is None or file != part_name(step, rank, parts):
            raise damaged(f"{where}.file", f"is {file!r}, not part {rank} of {parts}")
        tensors: dict[str, TensorRecord] = {}
        for name, tensor in _mapping(fields["tensors"], f"{where}.tensors").items():
            if not 0 < len(name) <= LONGEST_TENSOR_NAME:
                raise damaged(f"{where}.tensors", f"has a name of {len(name)} characters")
            tensors[name] = TensorRecord.parse(tensor, f"{where}.tensors[{name!r}]")
        size = _integer(fields["bytes"], f"{where}.bytes")
        content = sum(tensor.nbytes for tensor in tensors.values())
        # What `write_part` puts into a header, at its longest: no more of it is ever parsed.
        header = _HEADER_BYTES + sum(
            _TENSOR_BYTES + _CHARACTER_BYTES * len(name) + _SIZE_BYTES * len(tensor.shape)
            for name, tensor in tensors.items()
        )
        if not content + 8 <= size <= content + 8 + min(header, LARGEST_HEADER_BYTES):
            raise damaged(f"{where}.bytes", f"is {size}, with {content} bytes of tensors")
        return cls(
            file=file,
            rank=rank,
            replica=_integer(fields["replica"], f"{where}.replica") if keyed else rank,
            position=_integer(fields["position"], f"{where}.position") if keyed else 0,
            parts=parts,
            bytes=size,
            sha256=_sha256(fields["sha256"], f"{where}.sha256"),
            tensors=tensors,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One published checkpoint: the state after `step` committed steps.

    Attributes:
        step: Steps committed.
        epoch: Position of the next sample: its epoch.
        offset: Position of the next sample: samples from the start of that epoch.
        generation: Membership number when it was written; a resumed run starts above it.
        samples_per_epoch: Samples of an epoch, to refuse another data set.
        job: The resolved job.
        values: State that is not a tensor, by name: optimizer scalars, parameter group settings,
            schedule, random state, metrics. Anything `values.encode` takes.
        ledger: Which samples have been committed.
        parts: The files, in order of rank, and so of replica and position.
        raycloud_version: Who wrote it.
        torch_version: Who wrote it.
        format: Number of this layout.
    """

    step: int
    epoch: int
    offset: int
    generation: int
    samples_per_epoch: int
    job: Mapping[str, Any]
    values: Mapping[str, Any]
    ledger: Mapping[str, Any]
    parts: tuple[PartRecord, ...]
    raycloud_version: str
    torch_version: str
    format: int = FORMAT

    @property
    def position(self) -> Position:
        """Where the next sample stands."""
        return Position(epoch=self.epoch, offset=self.offset)

    def __post_init__(self) -> None:
        """Check what belongs together: every part of this step once, every tensor once."""
        if not self.parts:
            raise damaged("manifest.parts", "is empty")
        count = len(self.parts)
        holder: dict[str, int] = {}
        for rank, part in enumerate(self.parts):
            expected = part_name(self.step, rank, count)
            if (part.file, part.rank, part.parts) != (expected, rank, count):
                raise damaged(f"manifest.parts[{rank}].file", f"is not {expected!r}")
            for name in part.tensors:
                if name in holder:
                    raise damaged(
                        f"manifest.parts[{rank}].tensors",
                        f"has {name!r}, which parts[{holder[name]}] has as well",
                    )
                holder[name] = rank
        keys = [(part.replica, part.position) for part in self.parts]
        if keys != sorted(set(keys)):
            raise damaged("manifest.parts", "are not each of another replica and position")

    @property
    def state_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`; the same manifest always gives the same bytes.

        Raises:
            CheckpointError: It would be over 32 MiB, or hold over a million values.
            TaskError: `job`, `values` or `ledger` holds what JSON cannot carry; names the key path.
        """
        plain = {
            "format": self.format,
            "step": self.step,
            "epoch": self.epoch,
            "offset": self.offset,
            "generation": self.generation,
            "samples_per_epoch": self.samples_per_epoch,
            "job": encode(dict(self.job), where="job"),
            "values": encode(dict(self.values), where="values"),
            "ledger": encode(dict(self.ledger), where="ledger"),
            "parts": [part.to_plain(keyed=self.format >= _KEYED) for part in self.parts],
            "raycloud_version": self.raycloud_version,
            "torch_version": self.torch_version,
        }
        body = json.dumps(plain, allow_nan=False).encode("ascii")
        content = _OPEN + _digest(body) + _MIDDLE + body + _CLOSE
        if len(content) > LARGEST_BYTES:
            raise CheckpointError(
                f"the manifest of step {self.step} has {len(content)} bytes, over {LARGEST_BYTES}",
                hint="keep large state in tensors, not in lists of numbers",
            )
        if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
            raise CheckpointError(
                f"the manifest of step {self.step} holds more than {MOST_VALUES} values",
                hint="keep large state in tensors, not in lists of numbers",
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes, place: str = "manifest.json") -> Manifest:
        """Read what `to_bytes` gave.

        Raises:
            CheckpointError: It has another format, or a file name is not a plain one.
            DamagedError: It is truncated, altered, or not a manifest; names `place` and what.
        """
        plain = _mapping(_parsed(_body(content, place), place), place)
        number = _integer(plain.get("format"), f"{place}: format", least=1)
        if number > FORMAT:
            raise CheckpointError(
                f"{place} has format {number}; this raycloud reads 1 to {FORMAT}",
                hint="resume with the version of raycloud that wrote it, or a newer one",
            )
        _record(plain, tuple(field.name for field in fields(cls)), place)

        def count(key: str) -> int:
            return _integer(plain[key], f"{place}: {key}")

        def state(key: str) -> Mapping[str, Any]:
            return _mapping(decode(plain[key], where=f"{place}: {key}"), f"{place}: {key}")

        parts = _sequence(plain["parts"], f"{place}: parts")
        return cls(
            step=count("step"),
            epoch=count("epoch"),
            offset=count("offset"),
            generation=count("generation"),
            samples_per_epoch=count("samples_per_epoch"),
            job=state("job"),
            values=state("values"),
            ledger=state("ledger"),
            parts=tuple(
                PartRecord.parse(part, f"{place}: parts[{rank}]", keyed=number >= _KEYED)
                for rank, part in enumerate(parts)
            ),
            raycloud_version=_text(plain["raycloud_version"], f"{place}: raycloud_version"),
            torch_version=_text(plain["torch_version"], f"{place}: torch_version"),
            format=number,
        )


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")


def _body(content: bytes, place: str) -> memoryview:
    """The bytes of the inner object, once they are known to be the ones that were written."""
    body = memoryview(content)[_BODY_AT : -len(_CLOSE)]
    head = _OPEN + _digest(body) + _MIDDLE
    if content[:_BODY_AT] != head or not content.endswith(_CLOSE):
        raise damaged(place, "is not what was written: its digest differs")
    return body


def _parsed(body: memoryview, place: str) -> object:
    try:
        return json_value(str(body, "ascii"))
    except ValueError as error:
        raise damaged(place, f"is not JSON: {error}") from error


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise damaged(where, f"is a {type(value).__name__}, not an object")
    return value


def _record(value: object, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """A JSON object with exactly these keys."""
    fields = _mapping(value, where)
    missing = sorted(set(keys) - set(fields))
    unknown = sorted(set(fields) - set(keys))
    if missing:
        raise damaged(where, f"lacks {', '.join(missing)}")
    if unknown:
        raise damaged(where, f"has unknown keys: {', '.join(unknown)[:200]}")
    return fields


def _sequence(value: object, where: str) -> list[Any]:
    """A JSON array (or a tuple, for records that have not been written yet)."""
    if not isinstance(value, (list, tuple)):
        raise damaged(where, f"is a {type(value).__name__}, not an array")
    return list(value)


def _integer(value: object, where: str, *, least: int = 0, most: int = _LARGEST) -> int:
    """An integer from `least` to `most`; a bool is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise damaged(where, f"is a {type(value).__name__}, not an integer")
    if not least <= value <= most:
        raise damaged(where, f"is not from {least} to {most}")
    return value


def _text(value: object, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise damaged(where, f"is a {type(value).__name__}, not a string")
    return value


def _sha256(value: object, where: str) -> str:
    """64 lower-case hexadecimal digits."""
    if _SHA256.fullmatch(_text(value, where)) is None:
        raise damaged(where, "is not a SHA-256 digest")
    return _text(value, where)


def split_names(sizes: Mapping[str, int], parts: int) -> tuple[tuple[str, ...], ...]:
    """Which member writes which tensors: largest first, each to the part with the fewest bytes.

    Depends only on the mapping's content, so members with the same sizes agree without talking.
    The fullest part is at most 4/3 of the best possible (Graham 1969).

    Args:
        sizes: Bytes by name.
        parts: How many parts; more than there are names leaves the last ones empty.

    Returns:
        The names of each part, sorted.

    Raises:
        ValueError: `parts` is less than 1.

    >>> split_names({"a": 4, "b": 3, "c": 2, "d": 2}, 2)
    (('a', 'd'), ('b', 'c'))
    """
    if parts < 1:
        raise ValueError(f"split_names() takes parts >= 1, got {parts}")
    # (bytes, names, index): names second, so that empty tensors spread as well.
    loads = [(0, 0, index) for index in range(parts)]
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, count, index = loads[0]
        chosen[index].append(name)
        heapq.heapreplace(loads, (load + size, count + 1, index))
    return tuple(tuple(sorted(names)) for names in chosen)
