"""Device: where a replica computes, how much memory its passes may take, and moving batches."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from raycloud.errors import PlacementError, TaskError

_PART = 4  # of memory may be kept: what is kept is one of several things that grow
_SPARE = 0.1  # of the memory of a pass is left free: sizes and fragments vary
# Where groups (cgroups) are, and their files: limit, use, and the part of that which files take
# that nobody has asked for lately, so that it can be had. By version.
_NEW = ("memory.max", "memory.current", "inactive_file")
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NEW_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_OLD_MOUNTS = ("sys/fs/cgroup/memory",)


def choose(gpus: int) -> torch.device:
    """The device of a worker that reserved `gpus` GPUs; Ray shows it only its own.

    `PlacementError`: a GPU was reserved, but torch sees none.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        what = "install a CUDA build of torch on this node"
        if torch.version.cuda is not None:
            what = "start Ray on this node with as many GPUs as nvidia-smi shows there"
        raise PlacementError(
            "a GPU was reserved for this worker, but torch sees none",
            hint=f"{what}, or set resources.worker.gpus to 0",
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
    what torch finds, and the model. Two models may round alike all the same; nothing comes of it.
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


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, up to 1 GiB: a training process asks for it every step.

    Without it, a step of a 1.9-million-parameter model gives back and takes anew 1,000 to 3,500
    pages, each of them cleared by the kernel. False: this C library could not be told.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # mmap threshold (glibc refuses more), trim threshold and top pad, as malloc.h numbers them
    wanted = {-3: 32 * 2**20 - 1, -1: 2**30, -2: 64 * 2**20}
    return all(mallopt(number, value) == 1 for number, value in wanted.items())


def give_back_memory() -> None:
    """What the C library keeps of freed memory goes back to the system."""
    with suppress(AttributeError, OSError):  # another one than glibc
        ctypes.CDLL(None).malloc_trim(0)


def room_bytes(reserved_bytes: int | None, root: Path = Path("/")) -> int:
    """A quarter of the memory that a member could have now: so much it may keep beside training.

    That is what is left of the machine's memory, its groups', and what it has reserved (None: all),
    as the system's files below `root` say.
    """
    left = [_machine_bytes(root), *_groups_bytes(root)]
    if reserved_bytes is not None:
        left.append(reserved_bytes - process_bytes(root)[0])
    return max(0, min(left)) // _PART


def pass_room_bytes(
    device: torch.device, reserved_bytes: int | None, root: Path = Path("/")
) -> int:
    """So much memory a pass may take beside what its member holds now.

    On a GPU nine tenths of what is free there, or kept by torch and not in use. On a CPU nine
    tenths of what is left of the reserved bytes, if the machine and its groups have so much; of a
    member that has reserved none a quarter of what these have, since others compute there, too.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((1.0 - _SPARE) * (free_bytes + kept))
    give_back_memory()
    if reserved_bytes is None:
        return room_bytes(None, root)
    own_bytes = reserved_bytes - process_bytes(root)[0]
    return max(0, int((1.0 - _SPARE) * min(own_bytes, _machine_bytes(root), *_groups_bytes(root))))


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int | None:
    """The most memory that computing takes, beside what is held before; None: it is not told.

    On a CPU, what was freed goes back to the system first, and Linux is asked to forget the most
    that this process has had.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before_bytes
    give_back_memory()
    told = _forget_peak()
    before_bytes, _ = process_bytes()
    compute()
    return process_bytes()[1] - before_bytes if told and before_bytes else None


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMemory:
    """Bytes of a pass: fixed_bytes + b * micro_batch_bytes, for b micro-batches.

    Attributes:
        fixed_bytes: What does not depend on how many there are, such as gradients.
        micro_batch_bytes: Of each.
        tried: The largest pass that was computed.
    """

    fixed_bytes: float
    micro_batch_bytes: float
    tried: int

    @classmethod
    def fitted(cls, peaks: Mapping[int, int]) -> PassMemory:
        """The line of least squares through the bytes of passes of so many micro-batches.

        Through a single one it begins at 0, which promises no more than there is. It does not fall.

        >>> PassMemory.fitted({1: 30, 2: 40, 4: 60})
        PassMemory(fixed_bytes=20.0, micro_batch_bytes=10.0, tried=4)
        >>> PassMemory.fitted({2: 30})
        PassMemory(fixed_bytes=0.0, micro_batch_bytes=15.0, tried=2)
        """
        tried = max(peaks)
        mean = sum(peaks) / len(peaks)
        height = sum(peaks.values()) / len(peaks)
        spread = sum((b - mean) ** 2 for b in peaks)
        slope = height / mean
        if spread:
            slope = sum((b - mean) * (y - height) for b, y in peaks.items()) / spread
        slope = max(slope, 0.0)
        return cls(
            fixed_bytes=max(height - slope * mean, 0.0), micro_batch_bytes=slope, tried=tried
        )

    def bytes(self, micro_batches: int) -> float:
        """Of a pass of so many."""
        return self.fixed_bytes + micro_batches * self.micro_batch_bytes

    def largest(self, room_bytes: float, most: int) -> int:
        """The largest pass that fits, of `most` at most; at least what was tried.

        >>> PassMemory(fixed_bytes=20.0, micro_batch_bytes=10.0, tried=4).largest(95.0, 100)
        7
        """
        if self.bytes(most) <= room_bytes:
            return most
        if self.micro_batch_bytes <= 0.0:
            return min(most, self.tried)
        fits = int((room_bytes - self.fixed_bytes) / self.micro_batch_bytes)
        return min(most, max(fits, self.tried))


def process_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """What this process has in memory now, and what it has had at most; zeros: it is not told."""
    status = root / "proc/self/status"
    now_kb, most_kb = (_number(status, name) or 0 for name in ("VmRSS", "VmHWM"))
    return 1024 * now_kb, 1024 * most_kb


def _machine_bytes(root: Path) -> int:
    available_kb = _number(root / "proc/meminfo", "MemAvailable")
    if available_kb is not None:
        return available_kb * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4  # where no Linux is


def _groups_bytes(root: Path) -> Iterator[int]:
    """What is left in each group of this process that has a limit, up to the topmost."""
    # A container may see its own group as the topmost, but be told where it is outside: then the
    # topmost that it sees is all that there is to look at.
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounts, files = (_OLD_MOUNTS, _OLD) if controllers else (_NEW_MOUNTS, _NEW)
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents) if ".." not in below.parts else (Path(),):
            for mount in mounts:
                left = _left_bytes(root / mount / folder, *files)
                if left is not None:
                    yield left


def _left_bytes(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """What a group may still take; None where it may take all."""
    limit_bytes, used_bytes = (_number(folder / name) for name in (limit, used))
    if limit_bytes is None or used_bytes is None:
        return None
    return limit_bytes - used_bytes + (_number(folder / "memory.stat", reclaimable) or 0)


def _number(file: Path, name: str = "") -> int | None:
    """The number after a name in a file, or the first of all; None: there is none."""
    for line in _lines(file):
        words = line.replace(":", " ").split()
        if not name or words[:1] == [name]:
            number = words[1 if name else 0]
            return int(number) if number.isdecimal() else None  # `max`: there is no limit
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not there, or the group has ended meanwhile
        return []


class PassSize:
    """How many micro-batches a pass of this member has, at most.

    Memory that a pass does not find ends a process on a CPU, which nobody can catch. So a share
    that has grown, since members went, is not fused whole at once: unless a user has asked for that
    many (`stepwise`), passes become twice as large from one step to the next, while memory for that
    is at hand, of what is reserved or of all. `most` becomes less where a pass turns out not exact.
    """

    def __init__(
        self,
        most: int,
        device: torch.device,
        *,
        stepwise: bool,
        reserved_bytes: int | None,
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.most = most
        self._stepwise, self._notice = stepwise, notice
        self._device, self._reserved_bytes = device, reserved_bytes
        self._before_bytes = self._bytes()[0]  # no pass was computed
        self._bound = self._proven = self._held = most
        self._begun = False
        self._grows = True
        self._refused = 0  # the share for which memory was not at hand

    @property
    def now(self) -> int:
        """Micro-batches of a pass, at most."""
        return min(self.most, self._bound, self._held)

    def begin(self, tried: int) -> None:
        """So many have been computed at once: more than that only step by step."""
        if self._stepwise:
            self._proven = max(tried, self._proven if self._begun else 1)
            self._bound, self._begun = self._proven, True

    def hold(self, largest: int) -> None:
        """Memory holds no larger pass, as far as was found out: none is larger."""
        self._held = largest

    def resume(self, size: int) -> None:
        """Passes have been this large before the checkpoint: so they are, and round, again."""
        self._held = max(self._held, size)
        if self._stepwise:
            self._bound = self._proven = size
            self._begun = True

    def committed(self, sizes: Sequence[int]) -> bool:
        """A step with passes of such sizes is committed; whether those to come are larger."""
        bound, largest = self._bound, max(sizes, default=0)
        self._proven = max(self._proven, min(largest, self.now))
        if len(sizes) <= 1 or largest < bound or bound >= self.most:
            return False
        if bound < self._proven:  # it was this large before
            self._bound = min(2 * bound, self._proven)
        elif self._may_grow(sum(sizes)):
            self._bound = 2 * bound
        return self._bound > bound

    def lost(self) -> None:
        """A member was lost, and it may have been for memory: no pass is larger than ever before.

        All have grown alike. Where this one was about to compute, or has just computed, a larger
        pass than in any step that was committed, so was the one that is lost.
        """
        if self._bound > self._proven:
            what = f"a member was lost as passes became larger: they stay at {self._proven}"
            self._notice(what, {"was": self._bound})
            self._bound, self._grows = self._proven, False

    def be_careful(self) -> None:
        """Members are lost that compute this step: each micro-batch alone takes least memory."""
        self._bound = 1

    def _may_grow(self, share: int) -> bool:
        if not self._grows or share == self._refused:
            return False
        # Passes twice as large as the largest so far take at most as much more as one has taken in
        # all. Other members of a node grow at the same time: of the machine's memory a quarter is
        # this one's.
        now_bytes, peak_bytes = self._bytes()
        more_bytes = peak_bytes - self._before_bytes
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            kept_bytes = torch.cuda.memory_reserved(self._device)
            room = more_bytes <= free_bytes + kept_bytes - now_bytes
        else:
            room = peak_bytes > 0 and more_bytes <= room_bytes(self._reserved_bytes)
        if room:
            return True
        self._refused = share
        what = f"passes stay at {self._bound} micro-batches of {share}: there is no memory for more"
        self._notice(what, {"share": share})
        return False

    def _bytes(self) -> tuple[int, int]:
        """Now, and at most so far; (0, 0) where the system does not tell."""
        if self._device.type == "cuda":
            now_bytes = torch.cuda.memory_allocated(self._device)
            return now_bytes, torch.cuda.max_memory_allocated(self._device)
        return process_bytes()


def pin(value: Any) -> Any:
    """The batch with every tensor in page-locked memory, from which copies run asynchronously."""
    return _map(value, torch.Tensor.pin_memory)


def move(value: Any, device: torch.device) -> Any:
    """The batch on `device`; copies are queued on the current stream.

    On the CPU it is what it was. Elsewhere what has a `to` of its own (such as the batches of
    tokenizers and of graphs) moves itself, and containers are copied, of the same type.
    """
    if device.type == "cpu":
        return value
    return _map(value, lambda t: t.to(device, non_blocking=True), lambda one: one.to(device))


class Copies:
    """Copies batches to a GPU (on the CPU they stay) while it computes, on a stream of their own.

    Each step that a feed has in flight then takes the GPU memory of its batches.
    """

    def __init__(self, device: torch.device) -> None:
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
                there = _map(pin(batch), lambda t: t.to(self._device, non_blocking=True))
                done = torch.cuda.Event()
                done.record(self._stream)
        except torch.OutOfMemoryError:  # it goes there when it is needed: there may be room then
            return batch
        return _Sent(there, done)


@dataclass(frozen=True, slots=True)
class _Sent:
    batch: Any
    done: torch.cuda.Event


def arrived(batch: Any, device: torch.device) -> Any:
    """The batch on `device`, for what the current stream computes from now on.

    Its memory was taken on the copies' stream: recording the stream that uses it keeps it from
    being given to a later copy while this stream may still read it. What moves itself does so here.
    """
    if not isinstance(batch, _Sent):
        return move(batch, device)
    stream = torch.cuda.current_stream(device)
    stream.wait_event(batch.done)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(stream)
        return tensor

    return _map(batch.batch, take, lambda one: one.to(device))


def concatenate(batches: list[Any], samples: Sequence[int]) -> Any:
    """Batches joined along their first dimension; None where their form does not allow it.

    Only tensors of which that dimension is the number of `samples` of their batch are joined: any
    other may hold edges, offsets, or time.
    """

    def joined(*column: Any) -> Any:
        first = column[0]
        alike = all(type(one) is type(first) for one in column)
        if (
            isinstance(first, Mapping)
            and alike
            and all(one.keys() == first.keys() for one in column)
        ):
            return {key: tree_map(joined, *(one[key] for one in column)) for key in first}
        if any(not isinstance(one, torch.Tensor) for one in column):
            raise ValueError("something else than tensors")
        kinds = {(one.shape[1:], one.dtype) for one in column}
        each = all(one.shape[:1] == (many,) for one, many in zip(column, samples, strict=True))
        if not each or len(kinds) > 1:
            raise ValueError("unlike tensors")
        return torch.cat(column)

    try:
        return tree_map(joined, *batches)
    except ValueError:  # also of batches that are nested in unlike ways
        return None


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also those in lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


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
    if isinstance(value, (list, tuple)):
        parts = [_map(part, change, own) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            part = _map(getattr(value, field.name), change, own)
            object.__setattr__(made, field.name, part)  # it may be frozen
        return made
    return value


def _alike(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
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
