"""Global random generators: what a forward pass draws from is seeded by place, and given back.

torch's is seeded for each pass. numpy's and Python's are seeded only once something was seen to
draw from them; until then each pass looks whether they have moved, which takes two microseconds,
where reading them by their own functions takes seventy.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_NUMPY: Any = np.random  # its stubs leave out the two functions used here
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined] # whose methods `random` exports
_HEADER = object.__basicsize__
_PYTHON_BYTES = _random.Random.__basicsize__ - _HEADER
_NUMPY_BYTES = 625 * 4  # 624 words and a position: numpy's mt19937_state
_CPYTHON = sys.implementation.name == "cpython"
_NUMPY_SEEDS = 2**32
# numpy reads a generator that it does not hold: freed by another thread meanwhile, all would end.
_FIRST = _NUMPY.get_bit_generator()
_OWN = np.random.MT19937(0)  # in the place of numpy's while that is seeded


class Randomness:
    """The generators as a forward pass, or an optimizer, on a `device` finds them.

    Order of calls: `seed`, what may draw, and so on; then `release`. Where numpy's and Python's
    were seeded, for each pass where `everything` says so, they then stand where they stood before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.everything = False
        self._held: tuple[Any, Any] | None = None

    def seed(self, seed: int, *, everything: bool = False) -> None:
        """Seed what is drawn from: torch's, on the CPU and on the device; or `everything`."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        if not (everything or self.everything):
            return
        if self._held is None:
            numpys = _NUMPY.get_bit_generator()  # `_OWN` where another thread has seeded
            self._held = _FIRST if numpys is _OWN else numpys, random.getstate()
            _NUMPY.set_bit_generator(_OWN)
        np.random.seed(seed % _NUMPY_SEEDS)  # forgets what is left of a pair of normal values, too
        random.seed(seed)

    def release(self) -> None:
        """Nothing more is drawn for now: numpy's and Python's are those of everybody else again."""
        if self._held is not None:
            (numpys, pythons), self._held = self._held, None
            _NUMPY.set_bit_generator(numpys)
            random.setstate(pythons)

    def torch_state(self) -> bytes:
        """A fingerprint of torch's: equal where nothing was drawn between."""
        state = torch.default_generator.get_state().numpy().tobytes()
        if self._device.type == "cuda":
            index = self._device.index or 0
            state += torch.cuda.default_generators[index].get_state().numpy().tobytes()
        return state


def others_state() -> bytes:
    """A fingerprint of numpy's and Python's generators: equal where nothing was drawn between.

    It is their memory as it is. numpy shows where that lies; CPython's generator is an object whose
    size is that of its state, and a test holds that every kind of draw changes what is read here.
    """
    numpys: Any = _NUMPY.get_bit_generator()
    if isinstance(numpys, np.random.MT19937):
        found = ctypes.string_at(numpys.ctypes.state_address, _NUMPY_BYTES)
    else:  # somebody has put another one there
        found = repr(numpys.state).encode()
    if not _CPYTHON:
        return found + repr(random.getstate()).encode()
    return found + ctypes.string_at(id(_PYTHON) + _HEADER, _PYTHON_BYTES)


def global_draws() -> tuple[bytes, bytes]:
    """Fingerprints of torch's generator and of the `others`."""
    return torch.default_generator.get_state().numpy().tobytes(), others_state()


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


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
