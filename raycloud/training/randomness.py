"""What a task draws from: seeding it, and telling whether it was drawn from."""

from __future__ import annotations

import random  # noqa: TID251 - the user's code draws from it
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_compute(seed: int, device: torch.device) -> None:
    """Seed what a forward pass draws from, on the CPU and on `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def random_state(device: torch.device) -> bytes:
    """A fingerprint of what a forward pass draws from: equal where nothing was drawn between."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.default_generators[device.index or 0].get_state().numpy().tobytes()
    return state


def global_draws() -> tuple[bytes, bytes, int]:
    """Fingerprints of torch's and numpy's global generators: equal where nothing was drawn."""
    state: Any = np.random.get_state()
    return random_state(torch.device("cpu")), state[1].tobytes(), state[2]


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: TID251 - the user's code draws from it
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)  # noqa: TID251 - the same; where there are GPUs


def everything() -> tuple[Any, Any, torch.Tensor]:
    """The state of the global generators of Python, numpy and torch, for `restore`."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Set the global generators to what `everything` returned."""
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(of_torch)


@contextmanager
def preserved_random(device: torch.device) -> Iterator[None]:
    """Whatever is drawn meanwhile, the generators of torch, numpy and Python are as before."""
    cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
    states, on_device = everything(), None if cuda is None else cuda.get_state()
    try:
        yield
    finally:
        restore(states)
        if cuda is not None and on_device is not None:
            cuda.set_state(on_device)
