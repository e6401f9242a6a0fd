"""Seeds that depend on what is computed, never on who computes it.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Scatter a 64-bit integer over all 64-bit integers, one to one.

    >>> mix(0), mix(1) != mix(2)
    (0, True)
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_seed(*parts: int) -> int:
    """Fold integers, in order, into one seed in [0, 2**63).

    >>> stream_seed(0, 1) != stream_seed(1, 0)
    True
    """
    state = len(parts)
    for part in parts:
        state = mix((state + _GAMMA) ^ mix(part + _GAMMA))
    return state >> 1
