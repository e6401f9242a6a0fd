"""What a forward pass draws from: seeding it, and telling whether it was drawn from."""

from __future__ import annotations

import random  # noqa: TID251 - its state is kept here, nothing is drawn
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


@contextmanager
def preserved_random(device: torch.device) -> Iterator[None]:
    """Whatever is drawn meanwhile, the generators of torch, numpy and Python are as before."""
    cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
    state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    on_device = None if cuda is None else cuda.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if cuda is not None and on_device is not None:
            cuda.set_state(on_device)
