"""Where a replica computes, and moving batches there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raycloud.errors import PlacementError


def choose(gpus: int) -> torch.device:
    """The device of a worker that reserved `gpus` GPUs; Ray shows it only its own.

    Raises:
        PlacementError: A GPU was reserved, but torch sees none.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlacementError(
            "a GPU was reserved for this worker, but torch sees none",
            hint="install a CUDA build of torch on this node, or set resources.worker.gpus to 0",
        )
    return torch.device("cuda", 0)


def pin(value: Any) -> Any:
    """The batch with every tensor in page-locked memory, from which copies run asynchronously."""
    return _map(value, torch.Tensor.pin_memory)


def move(value: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`; the copy is queued on the current stream."""
    return _map(value, lambda tensor: tensor.to(device, non_blocking=True))


class Copies:
    """Copies batches to a GPU while it computes, on a stream of their own.

    Not yet measured: no GPU was at hand. Each step that a feed has in flight then takes the GPU
    memory of its batches.

    Args:
        device: Where batches are to go; on the CPU they stay as they are.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Any) -> Any:
        """Begin to copy, from page-locked memory; `arrived` gives what comes of it. Any thread.

        The allocator of page-locked memory keeps the source until the copy is done.
        """
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            there = move(pin(batch), self._device)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Sent(there, done)


class _Sent:
    """A batch on its way."""

    def __init__(self, batch: Any, done: torch.cuda.Event) -> None:
        self.batch = batch
        self.done = done


def arrived(batch: Any, device: torch.device) -> Any:
    """The batch on `device`, for what the current stream computes from now on.

    Its memory was taken on the copies' stream: recording the stream that uses it keeps it from
    being given to a later copy while this stream may still read it.
    """
    if not isinstance(batch, _Sent):
        return batch if device.type == "cpu" else move(batch, device)
    stream = torch.cuda.current_stream(device)
    stream.wait_event(batch.done)
    _map(batch.batch, lambda tensor: tensor.record_stream(stream))
    return batch.batch


def concatenate(batches: list[Any]) -> Any:
    """Batches joined along their first dimension; None where their form does not allow it."""
    first = batches[0]
    if any(type(b) is not type(first) for b in batches):
        return None
    if isinstance(first, torch.Tensor):
        alike = {(b.dim(), b.shape[1:], b.dtype) for b in batches}
        return torch.cat(batches) if first.dim() > 0 and len(alike) == 1 else None
    if isinstance(first, Mapping):
        if any(b.keys() != first.keys() for b in batches):
            return None
        joined = {key: concatenate([b[key] for b in batches]) for key in first}
        return None if any(value is None for value in joined.values()) else joined
    if isinstance(first, (list, tuple)):
        if any(len(b) != len(first) for b in batches):
            return None
        parts = [concatenate(list(column)) for column in zip(*batches, strict=True)]
        if any(part is None for part in parts):
            return None
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return None


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also those in lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_in(part)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from tensors_in(part)


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change) for part in value)
    return value
