"""How the C library keeps freed memory: a training process asks for the same sizes every step."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3), by their numbers in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

_KEEP_BYTES = 2**30
_GROW_BYTES = 64 * 2**20
_LARGEST_ON_HEAP_BYTES = 32 * 2**20 - 1  # more than that glibc refuses


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, up to 1 GiB, instead of giving it back each step.

    Without it, a backward pass gives back and takes anew thousands of pages a step, each of them
    cleared by the kernel: 1,000 to 3,500 page faults in a step of a 1.9-million-parameter model.

    Returns:
        Whether this C library could be told; another one manages as it likes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = {
        _MMAP_THRESHOLD: _LARGEST_ON_HEAP_BYTES,
        _TRIM_THRESHOLD: _KEEP_BYTES,
        _TOP_PAD: _GROW_BYTES,
    }
    return all(mallopt(number, value) == 1 for number, value in wanted.items())
