"""One member's file of a checkpoint, described: what the manifest says about it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycloud.checkpoint import strict
from raycloud.checkpoint.naming import check_final_name, part_name, step_of

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
        fields = strict.record(value, ("dtype", "shape"), where)
        dtype = strict.text(fields["dtype"], f"{where}.dtype")
        if dtype not in ELEMENT_BYTES:
            raise strict.refuse(f"{where}.dtype", f"is {dtype[:40]!r}, which is unknown")
        shape = strict.sequence(fields["shape"], f"{where}.shape")
        if len(shape) > _LARGEST_RANK:
            raise strict.refuse(f"{where}.shape", f"has {len(shape)} dimensions")
        sizes = tuple(strict.integer(size, f"{where}.shape") for size in shape)
        made = cls(dtype=dtype, shape=sizes)
        strict.integer(made.nbytes, f"{where} (bytes)")
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
        fields = strict.record(value, (*keys, "replica", "position") if keyed else keys, where)
        file = strict.text(fields["file"], f"{where}.file")
        check_final_name(file)
        parts = strict.integer(fields["parts"], f"{where}.parts", least=1, most=LARGEST_PARTS)
        rank = strict.integer(fields["rank"], f"{where}.rank", most=parts - 1)
        step = step_of(file)
        if step is None or file != part_name(step, rank, parts):
            raise strict.refuse(f"{where}.file", f"is {file!r}, not part {rank} of {parts}")
        tensors: dict[str, TensorRecord] = {}
        for name, tensor in strict.mapping(fields["tensors"], f"{where}.tensors").items():
            if not 0 < len(name) <= LONGEST_TENSOR_NAME:
                raise strict.refuse(f"{where}.tensors", f"has a name of {len(name)} characters")
            tensors[name] = TensorRecord.parse(tensor, f"{where}.tensors[{name!r}]")
        size = strict.integer(fields["bytes"], f"{where}.bytes")
        content = sum(tensor.nbytes for tensor in tensors.values())
        # What `write_part` puts into a header, at its longest: no more of it is ever parsed.
        header = _HEADER_BYTES + sum(
            _TENSOR_BYTES + _CHARACTER_BYTES * len(name) + _SIZE_BYTES * len(tensor.shape)
            for name, tensor in tensors.items()
        )
        if not content + 8 <= size <= content + 8 + min(header, LARGEST_HEADER_BYTES):
            raise strict.refuse(f"{where}.bytes", f"is {size}, with {content} bytes of tensors")
        return cls(
            file=file,
            rank=rank,
            replica=strict.integer(fields["replica"], f"{where}.replica") if keyed else rank,
            position=strict.integer(fields["position"], f"{where}.position") if keyed else 0,
            parts=parts,
            bytes=size,
            sha256=strict.sha256(fields["sha256"], f"{where}.sha256"),
            tensors=tensors,
        )


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
