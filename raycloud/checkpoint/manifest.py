"""What a checkpoint says about itself: `manifest.json`, format 3; formats 1 and 2 are read, too.

The file is one JSON object, `{"digest": "sha256:...", "manifest": {...}}`. The digest is over the
bytes of the inner object as they stand in the file, and what surrounds them is compared byte for
byte, so every truncation and every flipped bit is noticed, also in the digest itself.

In format 1 `values` has no `Tagged` ones. Up to format 2 a part is known by its rank alone: each
replica was one worker, and the rank its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raycloud.bounded import MOST_VALUES, json_value
from raycloud.checkpoint import strict
from raycloud.checkpoint.naming import DamagedError, part_name
from raycloud.checkpoint.part import PartRecord
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
_HINT = "use an older checkpoint: this one was altered or not written to the end"


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
            raise strict.refuse("manifest.parts", "is empty")
        count = len(self.parts)
        holder: dict[str, int] = {}
        for rank, part in enumerate(self.parts):
            expected = part_name(self.step, rank, count)
            if (part.file, part.rank, part.parts) != (expected, rank, count):
                raise strict.refuse(f"manifest.parts[{rank}].file", f"is not {expected!r}")
            for name in part.tensors:
                if name in holder:
                    raise strict.refuse(
                        f"manifest.parts[{rank}].tensors",
                        f"has {name!r}, which parts[{holder[name]}] has as well",
                    )
                holder[name] = rank
        keys = [(part.replica, part.position) for part in self.parts]
        if keys != sorted(set(keys)):
            raise strict.refuse("manifest.parts", "are not each of another replica and position")

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
        plain = strict.mapping(_parsed(_body(content, place), place), place)
        number = strict.integer(plain.get("format"), f"{place}: format", least=1)
        if number > FORMAT:
            raise CheckpointError(
                f"{place} has format {number}; this raycloud reads 1 to {FORMAT}",
                hint="resume with the version of raycloud that wrote it, or a newer one",
            )
        strict.record(plain, tuple(field.name for field in fields(cls)), place)

        def count(key: str) -> int:
            return strict.integer(plain[key], f"{place}: {key}")

        def state(key: str) -> Mapping[str, Any]:
            return strict.mapping(decode(plain[key], where=f"{place}: {key}"), f"{place}: {key}")

        parts = strict.sequence(plain["parts"], f"{place}: parts")
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
            raycloud_version=strict.text(plain["raycloud_version"], f"{place}: raycloud_version"),
            torch_version=strict.text(plain["torch_version"], f"{place}: torch_version"),
            format=number,
        )


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")


def _body(content: bytes, place: str) -> memoryview:
    """The bytes of the inner object, once they are known to be the ones that were written."""
    body = memoryview(content)[_BODY_AT : -len(_CLOSE)]
    head = _OPEN + _digest(body) + _MIDDLE
    if content[:_BODY_AT] != head or not content.endswith(_CLOSE):
        raise DamagedError(f"{place} is not what was written: its digest differs", hint=_HINT)
    return body


def _parsed(body: memoryview, place: str) -> object:
    try:
        return json_value(str(body, "ascii"))
    except ValueError as error:
        raise DamagedError(f"{place} is not JSON: {error}", hint=_HINT) from error
