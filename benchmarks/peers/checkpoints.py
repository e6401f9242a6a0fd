"""What a peer restarts from: parameters, optimizer state and progress in one safetensors file.

Drafted, synced and renamed, so that a file under its final name is whole; the newest two are kept,
for a reader may still hold the one before. Optimizer state is flat, by the parameters' names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

_KEPT = 2
_PROGRESS = "progress"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is.

    Attributes:
        update: Updates so far.
        samples: Samples so far, of all participants together.
    """

    update: int = 0
    samples: int = 0


Optimizers = Mapping[str, torch.optim.Optimizer]


def write(path: Path, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
    """Write one checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    for part, optimizer in optimizers.items():
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{part}/{key}/{name}"] = torch.as_tensor(value)
    tensors[_PROGRESS] = torch.tensor([progress.update, progress.samples])
    draft = path.with_suffix(f".{os.getpid()}.draft")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)


def read(path: Path, model: nn.Module, optimizers: Optimizers) -> Progress:
    """Restore one checkpoint in place.

    Raises:
        KeyError: It lacks a parameter.
    """
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model/{name}"])
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        part, _, rest = key.partition("/")
        if part in optimizers:
            kind, _, name = rest.partition("/")
            optimizers[part].state[parameters[name]][kind] = tensor.clone()
    update, samples = (int(value) for value in tensors[_PROGRESS])
    return Progress(update=update, samples=samples)


def path_of(directory: Path, update: int) -> Path:
    """Where the checkpoint after `update` is."""
    return directory / f"{update:08d}.safetensors"


def newest(directory: Path) -> int | None:
    """The update of the newest whole checkpoint; None if there is none."""
    updates = _updates(directory)
    return updates[-1] if updates else None


def keep(directory: Path, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
    """Write a checkpoint into a directory of them; remove those that nobody needs any more."""
    write(path_of(directory, progress.update), model, optimizers, progress)
    for update in _updates(directory)[:-_KEPT]:
        with contextlib.suppress(FileNotFoundError):
            path_of(directory, update).unlink()


def _updates(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.safetensors"))
