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
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from raycloud.bounded import MOST_VALUES, json_value
from raycloud.checkpoint.naming import damaged, part_name, step_of
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
_HEADER_BYTES = 128  # the metadata and the padding
_TENSOR_BYTES = 128  # the words of an entry, its type and its place
_CHARACTER_BYTES = 12  # a character outside of the basic plane, escaped
_SIZE_BYTES = 20  # a number of a shape
_LARGEST = 2**53  # above any counter or size, and exact wherever JSON numbers are doubles

T = TypeVar("T")
_Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
_TensorName = Annotated[str, Field(min_length=1, max_length=LONGEST_TENSOR_NAME)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor's type, in the words of the safetensors format, and shape."""

    dtype: Annotated[str, Field(pattern=f"^(?:{'|'.join(ELEMENT_BYTES)})$")]
    shape: Annotated[tuple[_Count, ...], Field(max_length=64)]

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """A file of a checkpoint, `rank` of its `parts`: its tensors, by qualified name.

    It was written by the worker at `position` of `replica`.
    """

    file: str
    rank: _Count
    replica: _Count
    position: _Count
    parts: Annotated[int, Field(strict=True, ge=1, le=LARGEST_PARTS)]
    bytes: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tensors: Mapping[_TensorName, TensorRecord]

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

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
            DamagedError: A key, type, name or size is wrong; names the key path.
        """
        if not keyed and isinstance(value, Mapping):
            value = {**value, "replica": value.get("rank"), "position": 0}
        part = _checked(_PART, value, where)
        step = step_of(part.file)
        if step is None or part.file != part_name(step, part.rank, part.parts):
            problem = f"is {part.file[:200]!r}, not part {part.rank} of {part.parts}"
            raise damaged(f"{where}.file", problem)
        content = sum(tensor.nbytes for tensor in part.tensors.values())
        # What `write_part` puts into a header, at its longest: no more of it is ever parsed.
        header = _HEADER_BYTES + sum(
            _TENSOR_BYTES + _CHARACTER_BYTES * len(name) + _SIZE_BYTES * len(tensor.shape)
            for name, tensor in part.tensors.items()
        )
        if not content + 8 <= part.bytes <= content + 8 + min(header, LARGEST_HEADER_BYTES):
            raise damaged(f"{where}.bytes", f"is {part.bytes}, with {content} bytes of tensors")
        return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One published checkpoint: the state after `step` committed steps.

    Attributes:
        format: Number of this layout.
        epoch: Where the next sample stands; `offset` samples from the start of that epoch.
        generation: Membership number when it was written; a resumed run starts above it.
        samples_per_epoch: To refuse another data set.
        job: The resolved job.
        values: State that is not a tensor, by name: optimizer scalars, parameter group settings,
            schedule, random state, metrics. Anything `values.encode` takes.
        ledger: Which samples have been committed.
        parts: The files, in order of rank, and so of replica and position.
    """

    format: Annotated[int, Field(strict=True, ge=1)] = FORMAT
    step: _Count
    epoch: _Count
    offset: _Count
    generation: _Count
    samples_per_epoch: _Count
    job: Mapping[str, Any]
    values: Mapping[str, Any]
    ledger: Mapping[str, Any]
    parts: tuple[PartRecord, ...]
    raycloud_version: str
    torch_version: str

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

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
                if holder.setdefault(name, rank) != rank:
                    problem = f"has {name!r}, which parts[{holder[name]}] has as well"
                    raise damaged(f"manifest.parts[{rank}].tensors", problem)
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
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _STATE:
            plain[name] = encode(dict(plain[name]), where=name)
        plain["parts"] = [part.to_plain(keyed=self.format >= _KEYED) for part in self.parts]
        body = json.dumps(plain, allow_nan=False).encode("ascii")
        content = _OPEN + _digest(body) + _MIDDLE + body + _CLOSE
        over = None
        if len(content) > LARGEST_BYTES:
            over = f"has {len(content)} bytes, over {LARGEST_BYTES}"
        elif sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
            over = f"holds more than {MOST_VALUES} values"
        if over:
            raise CheckpointError(
                f"the manifest of step {self.step} {over}",
                hint="keep large state in tensors, not in lists of numbers",
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes, place: str = "manifest.json") -> Manifest:
        """Read what `to_bytes` gave.

        Raises:
            CheckpointError: It has another format.
            DamagedError: It is truncated, altered, or not a manifest; names `place` and what.
        """
        body = memoryview(content)[_BODY_AT : -len(_CLOSE)]
        head = _OPEN + _digest(body) + _MIDDLE
        if content[:_BODY_AT] != head or not content.endswith(_CLOSE):
            raise damaged(place, "is not what was written: its digest differs")
        try:
            plain = json_value(str(body, "ascii"))
        except ValueError as error:
            raise damaged(place, f"is not JSON: {error}") from error
        if not isinstance(plain, dict):
            raise damaged(place, f"is a {type(plain).__name__}, not an object")
        number = plain.setdefault("format", None)
        if isinstance(number, int) and number > FORMAT:
            raise CheckpointError(
                f"{place} has format {number}; this raycloud reads 1 to {FORMAT}",
                hint="resume with the version of raycloud that wrote it, or a newer one",
            )
        for name in _STATE & plain.keys():
            plain[name] = decode(plain[name], where=f"{place}: {name}")
        if isinstance(parts := plain.get("parts"), list):
            keyed = isinstance(number, int) and number >= _KEYED
            plain["parts"] = tuple(
                PartRecord.parse(part, f"{place}: parts[{rank}]", keyed=keyed)
                for rank, part in enumerate(parts)
            )
        return _checked(_MANIFEST, plain, f"{place}: manifest")


_STATE = {"job", "values", "ledger"}  # what may hold any state that is no tensor
_PART = TypeAdapter(PartRecord)
_MANIFEST = TypeAdapter(Manifest)


def _checked(kind: TypeAdapter[T], value: object, where: str) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        keys = (f"[{key}]" if isinstance(key, int) else f".{_shown(key)}" for key in first["loc"])
        what = f"{first['msg']}, not {_shown(first['input'])}"
        raise damaged(f"{where}{''.join(keys)}:", what) from None


def _shown(value: object) -> str:
    """A name as it is, where it is one; anything else as Python writes it, cut."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w/.-]{1,80}", value)
    return str(value) if plain else f"{value!r:.80}"


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")


def split_names(sizes: Mapping[str, int], parts: int) -> tuple[tuple[str, ...], ...]:
    """Which member writes which tensors: largest first, each to the part with the fewest bytes.

    Depends only on the mapping's content, so members with the same sizes agree without talking.
    The fullest part is at most 4/3 of the best possible (Graham 1969). More parts than there are
    names leave the last ones empty. The names of a part are sorted.

    >>> split_names({"a": 4, "b": 3, "c": 2, "d": 2}, 2)
    (('a', 'd'), ('b', 'c'))
    """
    # (bytes, names, index): names second, so that empty tensors spread as well.
    loads = [(0, 0, index) for index in range(parts)]
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, count, index = loads[0]
        chosen[index].append(name)
        heapq.heapreplace(loads, (load + size, count + 1, index))
    return tuple(tuple(sorted(names)) for names in chosen)
