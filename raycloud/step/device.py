"""Where a replica computes, and moving batches there."""

from __future__ import annotations

import copy
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from raycloud.errors import PlacementError, TaskError


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


def failure(error: BaseException) -> str:
    r"""What a GPU says that computes nothing any more in this process; empty: it does.

    That is any error of CUDA but for too little memory: after one, each call ends with it.

    >>> failure(RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore"))
    'CUDA error: uncorrectable ECC error encountered'
    >>> failure(ValueError("no")), failure(RuntimeError("CUDA error: out of memory"))
    ('', '')
    """
    one: BaseException | None = error
    while one is not None:
        text = str(one)
        if isinstance(one, RuntimeError) and "CUDA error" in text and "out of memory" not in text:
            return text[text.index("CUDA error") :].splitlines()[0]
        one = one.__cause__
    return ""


def processor(device: torch.device) -> str:
    """The kind of processor: replicas on two of one kind round in the same way.

    What decides is which instructions torch and the libraries below it choose: by the architecture,
    what torch finds, and the model, which those libraries look at. Two models may round alike all
    the same; then nothing comes of it.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    model = ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "CPU part"}:
                model = " ".join(value.split())
                break
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {model}"


def pin(value: Any) -> Any:
    """The batch with every tensor in page-locked memory, from which copies run asynchronously."""
    return _map(value, torch.Tensor.pin_memory)


def move(value: Any, device: torch.device) -> Any:
    """The batch on `device`; copies are queued on the current stream.

    On the CPU it is what it was. Elsewhere what has a `to` of its own (such as the batches of
    tokenizers and of graphs) moves itself, and containers are copied, of the same type.
    """
    return value if device.type == "cpu" else _map(value, _copy_to(device), _move_to(device))


class Copies:
    """Copies batches to a GPU while it computes, on a stream of their own.

    Each step that a feed has in flight takes the GPU memory of its batches.

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
        try:
            with torch.cuda.stream(self._stream):
                there = _map(pin(batch), _copy_to(self._device))
                done = torch.cuda.Event()
                done.record(self._stream)
        except torch.OutOfMemoryError:  # it goes there when it is needed: there may be room then
            return batch
        return _Sent(there, done)


class _Sent:
    """A batch on its way."""

    def __init__(self, batch: Any, done: torch.cuda.Event) -> None:
        self.batch = batch
        self.done = done


def arrived(batch: Any, device: torch.device) -> Any:
    """The batch on `device`, for what the current stream computes from now on.

    Its memory was taken on the copies' stream: recording the stream that uses it keeps it from
    being given to a later copy while this stream may still read it. What moves itself does so here:
    nobody else knows its tensors.
    """
    if not isinstance(batch, _Sent):
        return move(batch, device)
    stream = torch.cuda.current_stream(device)
    stream.wait_event(batch.done)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(stream)
        return tensor

    return _map(batch.batch, take, _move_to(device))


def concatenate(batches: list[Any], samples: Sequence[int]) -> Any:
    """Batches joined along their first dimension; None where their form does not allow it.

    Args:
        batches: All alike.
        samples: How many each is of. Only tensors of which that is the first dimension are joined:
            any other may hold edges, offsets, or time.
    """
    first = batches[0]
    if any(type(b) is not type(first) for b in batches):
        return None
    if isinstance(first, torch.Tensor):
        alike = {(b.shape[1:], b.dtype) for b in batches}
        each = all(b.shape[:1] == (count,) for b, count in zip(batches, samples, strict=True))
        return torch.cat(batches) if each and len(alike) == 1 else None
    if isinstance(first, Mapping):
        if any(b.keys() != first.keys() for b in batches):
            return None
        joined = {key: concatenate([b[key] for b in batches], samples) for key in first}
        return None if any(value is None for value in joined.values()) else joined
    if isinstance(first, (list, tuple)):
        if any(len(b) != len(first) for b in batches):
            return None
        parts = [concatenate(list(column), samples) for column in zip(*batches, strict=True)]
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


def _copy_to(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=True)


def _move_to(device: torch.device) -> Callable[[Any], Any]:
    return lambda one: one.to(device)


def _map(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    own: Callable[[Any], Any] = lambda one: one,
) -> Any:
    """The same with each tensor changed; `own` says what becomes of what can move itself."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return own(value)
    if isinstance(value, Mapping):
        items = {key: _map(part, change, own) for key, part in value.items()}
        return items if type(value) is dict else _alike(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(part, change, own) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change, own) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            part = _map(getattr(value, field.name), change, own)
            object.__setattr__(made, field.name, part)  # it may be frozen
        return made
    return value


def _alike(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other items."""
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
    except Exception as error:
        raise TaskError(
            f"Task.batch returned a {type(value).__name__}, which cannot be copied to the GPU: "
            f"{type(error).__name__}: {error}",
            hint="give it a method to(device), or return a dict",
        ) from error
    return made
