"""Tensors of a checkpoint: parts in the safetensors format, written, read and compared.

A part is written straight from the tensors' memory; the format's own library reads it, after size
and digest have been compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from raycloud.checkpoint.manifest import (
    LARGEST_HEADER_BYTES,
    LARGEST_PARTS,
    LONGEST_TENSOR_NAME,
    PartRecord,
    TensorRecord,
)
from raycloud.checkpoint.naming import damaged, part_name
from raycloud.checkpoint.published import latest
from raycloud.errors import CheckpointError, InternalError, TaskError

if TYPE_CHECKING:
    from raycloud.checkpoint.manifest import Manifest
    from raycloud.checkpoint.store import Store

FORMAT = "1"

_DTYPES: dict[torch.dtype, str] = {  # by the names of the safetensors format
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
_HINT_COMPARE = "compare two runs of one job, each to its end"

# Small enough to stay in a core's cache between digest and write, large enough that the interpreter
# lock is free nearly all the time.
_CHUNK_BYTES = 2**20


def write_part(
    store: Store, *, step: int, rank: int, parts: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Write one member's tensors, on any device, by qualified name: part `rank` of `parts`.

    Contiguous CPU tensors are written from their own memory. Others are copied one at a time. The
    caller leaves the tensors unchanged until this returns. Rewriting a part of a published
    checkpoint with other content damages that checkpoint until it is published again.

    Returns:
        The part's record for the manifest, as JSON values; `PartRecord.parse` reads it.

    Raises:
        CheckpointError: The store cannot write it.
        TaskError: A tensor or its name cannot be stored in this format.
    """
    if not (0 <= rank < parts <= LARGEST_PARTS and step >= 0):
        raise InternalError(f"write_part() of step {step}, part {rank} of {parts}")
    if sys.byteorder != "little":
        what = "the checkpoint format is little-endian and this machine is not"
        raise CheckpointError(what, hint="run the workers on x86-64 or ARM machines")
    records = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    # Largest elements first keeps every tensor aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    head = _header(records, order)
    digest = hashlib.sha256()
    size = 0

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in _pieces(head, (tensors[name] for name in order)):
            digest.update(piece)
            size += len(piece)
            yield piece

    file = part_name(step, rank, parts)
    store.write(file, chunks())
    return {
        "file": file,
        "rank": rank,
        "parts": parts,
        "bytes": size,
        "sha256": digest.hexdigest(),
        "tensors": {name: records[name].to_plain() for name in order},
    }


def read_part(store: Store, record: PartRecord | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read one part as CPU tensors; size and digest are compared before anything is parsed.

    `record` is what `write_part` returned, or the manifest's.

    Raises:
        DamagedError: The file is missing or is not what was written.
    """
    part = record if isinstance(record, PartRecord) else PartRecord.parse(record)
    return parse_part(read_content(store, part), part, store.place)


def read_content(store: Store, part: PartRecord) -> bytes:
    """The bytes of a part's file; only their number is compared with the record."""
    size = store.size(part.file)  # first, so that a swapped file cannot fill the memory
    if size != part.bytes:
        place = f"{store.place}/{part.file}"
        raise damaged(place, f"has {size} bytes, not {part.bytes}")
    return store.read(part.file)


def parse_part(content: bytes, part: PartRecord, store: str) -> dict[str, torch.Tensor]:
    """The tensors in the content of a part's file, compared with the record first.

    Raises:
        DamagedError: It is not what was written.
    """
    place = f"{store}/{part.file}"
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise damaged(place, "is not what was written: its digest differs")
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise damaged(place, f"is not a safetensors file: {error}") from error
    found = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    if found != part.tensors:
        raise damaged(place, "holds other tensors than its record says")
    return tensors


def load_tensors(
    store: Store, manifest: Manifest, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors, whoever wrote them; parts without a wanted name are not read.

    Raises:
        CheckpointError: A name is not in this checkpoint.
        DamagedError: A part is missing or is not what was written.
    """
    held = {name for part in manifest.parts for name in part.tensors}
    wanted = held if names is None else set(names)
    if unknown := sorted(wanted - held):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} holds no tensor {unknown[0]!r} "
            f"({len(unknown)} missing)",
            hint="the model or the optimizer has changed since: train from the start, or use the "
            "task that wrote it",
        )
    tensors: dict[str, torch.Tensor] = {}
    for part in manifest.parts:
        if here := wanted.intersection(part.tensors):
            found = read_part(store, part)
            tensors |= {name: found[name] for name in part.tensors if name in here}
    return tensors


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what `write_part` could not write, by a `TaskError` that names the tensor."""
    _header({name: _describe(name, t) for name, t in tensors.items()}, list(tensors))


def _describe(name: str, tensor: torch.Tensor) -> TensorRecord:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta:
        raise TaskError(
            f"the tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be "
            "written to a checkpoint",
            hint=f"keep state in dense tensors of a type among {', '.join(map(str, _DTYPES))}",
        )
    return TensorRecord(dtype=dtype, shape=tuple(tensor.shape))


def _header(records: Mapping[str, TensorRecord], order: list[str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"raycloud.format": FORMAT}}
    at = 0
    for name in order:
        if name in fields or not name.isprintable() or not 0 < len(name) <= LONGEST_TENSOR_NAME:
            raise TaskError(
                f"{name!r} cannot name a tensor", hint="rename that parameter or buffer"
            )
        end = at + records[name].nbytes
        fields[name] = {**records[name].to_plain(), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER_BYTES:
        raise TaskError(
            f"the names of {len(order)} tensors fill {len(text)} bytes, over the format's limit of "
            f"{LARGEST_HEADER_BYTES}",
            hint="use shorter names or more workers",
        )
    return len(text).to_bytes(8, "little") + text


def _pieces(head: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # Not reshape(-1): a single element counts as contiguous whatever its stride, and keeps it.
        raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
        for start in range(0, raw.nbytes, _CHUNK_BYTES):
            yield raw[start : start + _CHUNK_BYTES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far two checkpoints of a step are apart.

    Attributes:
        tensors: How many were compared.
        largest: max |a - b| over all of them; infinite where one is not a number.
        tensor: The name of the tensor that has it.
        parameters: The same over the model's own alone.
        precision: The least precise number type of the model's parameters, such as `float64`.
    """

    step: int
    tensors: int
    largest: float
    tensor: str
    parameters: float
    precision: str


def difference(one: Store, other: Store) -> Difference:
    """Compare the newest checkpoints of two runs.

    Raises:
        CheckpointError: One has none, or they are not of the same step and tensors.
    """
    a, b = (latest(store).manifest for store in (one, other))
    if a is None or b is None:
        none = (one if a is None else other).place
        raise CheckpointError(f"{none} has no checkpoint", hint=_HINT_COMPARE)
    if a.step != b.step:
        raise CheckpointError(
            f"{one.place} ends at step {a.step}, {other.place} at step {b.step}", hint=_HINT_COMPARE
        )
    return compared(load_tensors(one, a), load_tensors(other, b), step=a.step)


def compared(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], *, step: int
) -> Difference:
    """Compare tensors by name.

    Raises:
        CheckpointError: Not both have the same names and shapes.
    """
    for name in sorted(a.keys() ^ b.keys()):
        raise CheckpointError(f"only one of the two checkpoints has {name!r}", hint=_HINT_COMPARE)
    for name in sorted(a):
        if a[name].shape != b[name].shape:
            raise CheckpointError(f"{name!r} has two shapes", hint=_HINT_COMPARE)
    apart = {name: _apart(a[name], b[name]) for name in sorted(a)}
    worst = max(apart, key=apart.__getitem__, default="")
    model = {name: t for name, t in a.items() if name.startswith("model/")}
    types = {t.dtype for t in model.values() if t.is_floating_point()}
    least = max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    return Difference(
        step=step,
        tensors=len(a),
        largest=apart.get(worst, 0.0),
        tensor=worst,
        parameters=max((apart[name] for name in model), default=0.0),
        precision=str(least).removeprefix("torch."),
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel() or torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = float((a.to(wide) - b.to(wide)).abs().max())
    return math.inf if math.isnan(largest) else largest
