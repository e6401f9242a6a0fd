"""A fingerprint of a task's own samples: digests of a few of them, to be compared.

Members compare theirs before the first step, and a resumed run its own with the checkpoint's: where
`Task.data` gives other samples in another process, nothing that is said of the order, of what
counts once and of what is held out would be true. A `Source` gives the same by construction.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import struct
import types
import uuid
from collections.abc import Iterable, Mapping, Set
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import DataError, RaycloudError, TaskError
from raycloud.step.collate import reader
from raycloud.step.contract import raised

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.provider import Provided
    from raycloud.task import Samples

SAMPLES = "samples"  # its name among a checkpoint's values
TRAIN, HELD_OUT = "train", "held_out"

_IDS = 7  # of a split, beside the last one
_ENOUGH_S = 0.03  # for a split; one sample is read however long that takes
_MOST_VALUES = 4096  # of a sample
_END_BYTES = 1 << 16  # of an array, from its beginning and from its end
_DIGITS = 8  # bytes of a digest that is kept
_PLAIN = (bool, int, complex, type(None), type(Ellipsis), types.FunctionType, type)
_BY_REPR = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    enum.Enum,
    pathlib.PurePath,
    range,
    uuid.UUID,
)


def fingerprint_of(data: Provided, clock: Clock) -> dict[str, str]:
    """Digests of some samples of the task's own, by split and id: `train/127`.

    Data that has grown has most of these ids in common with that of before. Of a slow data set
    there are fewer.

    Raises:
        TaskError: A sample is another one each time it is read; or the task's code raised.
    """
    found = _split(TRAIN, data.train, clock)
    return found if data.held_out is None else found | _split(HELD_OUT, data.held_out, clock)


def check_samples(now: Mapping[str, str], kept: Any) -> str:
    """Compare samples with those that a checkpoint has `kept`; returns what is to be noticed.

    Some may have been corrected, and held-out ones chosen anew. Where most of the training samples
    are others it is another order, or other data: `DataError`.
    """
    kept = kept if isinstance(kept, Mapping) else {}  # of a version that kept none
    common = [name for name in now if name in kept]
    other = [name for name in common if now[name] != kept[name]]
    train, trained = ([n for n in names if n.startswith(TRAIN)] for names in (other, common))
    if len(train) * 2 > len(trained):
        raise DataError(
            "the data has changed: Task.data gives other training samples than when the checkpoint "
            f"was made (ids {', '.join(name.partition('/')[2] for name in train)})",
            hint="bring the data back as it was, or start a new run in another --run-dir; what "
            "Task.data draws (a split, a shuffle) also depends on how many samples there are, "
            "unless it is given a generator and draws for each sample by itself",
        )
    return ", ".join(other)


def chosen(count: int) -> list[int]:
    """Ids of samples, the first of which are the same whether there are some more or not.

    >>> chosen(150), chosen(151)[:7], chosen(1)
    ([127, 63, 31, 15, 7, 3, 1, 149], [127, 63, 31, 15, 7, 3, 1], [0])
    """
    powers = [2**k - 1 for k in range(max(count, 1).bit_length()) if 2**k - 1 < count]
    return list(dict.fromkeys([*reversed(powers[-_IDS:]), *([count - 1] if count else [])]))


def _split(split: str, samples: Samples, clock: Clock) -> dict[str, str]:
    """Digests of some of a split's samples, two of them read twice; none of blocks."""
    found: dict[str, str] = {}
    if hasattr(samples, "gather"):
        return found
    until_s, read, ids = clock.monotonic_s() + _ENOUGH_S, reader(samples), chosen(len(samples))
    for id_ in [*ids, *ids[:2]]:
        name, digest = f"{split}/{id_}", None
        try:
            digest = digest_of(read(np.array([id_]))[0])
        except RaycloudError:
            raise
        except Exception:  # noqa: BLE001 - a step, or the measuring, meets it too, and may skip it
            pass
        except BaseException as error:
            raise raised(f"reading sample {id_} of Task.data's {split}", error) from error
        if digest is not None and found.setdefault(name, digest) != digest:
            raise TaskError(
                f"sample {id_} of Task.data's {split} is another one each time it is read",
                hint="a data set gives the same sample each time, in every worker: what is random, "
                "such as augmentation, belongs into Task.batch, drawn from its `rng`",
            )
        if clock.monotonic_s() > until_s:
            break
    return found


def digest_of(value: Any) -> str:
    """A digest of a sample of any type, the same in every process: 16 hex digits.

    By value: of arrays type, shape and content, of mappings and sets whatever their order is, of
    other objects their class and attributes. What has no value counts by its type.
    """
    return _Digest().of(value)[:_DIGITS].hex()


class _Digest:
    """Of one sample, which may be large, and may hold itself."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES
        self._above: set[int] = set()

    def of(self, value: Any) -> bytes:
        self._left -= 1
        if self._left < 0 or id(value) in self._above:
            return _hash("more")
        self._above.add(id(value))
        try:
            return self._of(value)
        finally:
            self._above.discard(id(value))

    def _of(self, value: Any) -> bytes:
        match value:
            case torch.Tensor():
                return self._tensor(value)
            case np.ndarray() | np.generic():
                return self._array(np.asarray(value))
            case Mapping():
                pairs = [self.of(key) + self.of(part) for key, part in _some(value.items())]
                return _hash("mapping", *sorted(pairs))
            case Set():
                return _hash("set", *sorted(self.of(part) for part in _some(value)))
            case list() | tuple():
                return _hash(type(value).__name__, *(self.of(part) for part in _some(value)))
            case _:
                return _hash_of_one(value) or self._object(value)

    def _tensor(self, value: torch.Tensor) -> bytes:
        if value.layout is not torch.strided or value.is_quantized:
            return _hash("tensor", str(value.layout), str(tuple(value.shape)))
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _hash("tensor", str(value.dtype), str(tuple(value.shape)), *_ends(flat))

    def _array(self, value: np.ndarray[Any, Any]) -> bytes:
        if value.dtype.hasobject:
            parts = _some(value.reshape(-1).tolist())
            return _hash("objects", str(value.shape), *(self.of(part) for part in parts))
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _hash("array", value.dtype.str, str(value.shape), *_ends(flat))

    def _object(self, value: Any) -> bytes:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):  # an image
            return _hash(name, str(value.mode), str(value.size), *_ends(value.tobytes()))
        if callable(getattr(value, "to_numpy", None)):  # of pandas
            return _hash(name, self.of(value.to_numpy()))
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            named: Iterable[Any] = ((name, getattr(value, name)) for name in names)
        else:
            named = getattr(value, "__dict__", {}).items()
        parts = (_hash(key, self.of(part)) for key, part in _some(named))
        return _hash(name, *sorted(parts))


def _hash_of_one(value: Any) -> bytes | None:
    """Of a value that holds no others; None: it is none that is known here."""
    name = type(value).__name__
    if isinstance(value, str | bytes | bytearray | memoryview):
        return _hash(name, *_ends(value))
    if isinstance(value, float):
        return _hash(name, struct.pack("<d", value))
    if isinstance(value, _PLAIN):
        return _hash(name, getattr(value, "__qualname__", repr(value)))
    return _hash(name, repr(value)) if isinstance(value, _BY_REPR) else None


def _some(values: Iterable[Any]) -> Iterable[Any]:
    return islice(values, _MOST_VALUES)


def _ends(content: Any) -> tuple[bytes | str, ...]:
    """How much there is, and the beginning and the end of it."""
    size, parts = len(content), [content]
    if size > 2 * _END_BYTES:
        parts = [content[:_END_BYTES], content[-_END_BYTES:]]
    return (str(size), *(part if isinstance(part, str) else bytes(part) for part in parts))


def _hash(*parts: bytes | str) -> bytes:
    total = blake2b(digest_size=16)
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little"))
        total.update(content)
    return total.digest()
