"""Sizes of what travels."""

from __future__ import annotations


def ring_bytes(payload_bytes: int, members: int) -> int:
    """Bytes each of N members sends to reduce M bytes over a ring: 2 (N - 1) / N * M, rounded up.

    The bandwidth-optimal all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations", JPDC 2009): N - 1 rounds of reduce-scatter and N - 1 of
    all-gather, each of M / N bytes.

    >>> ring_bytes(1000, 1), ring_bytes(1000, 2), ring_bytes(1000, 4)
    (0, 1000, 1500)

    Raises:
        ValueError: `members` below 1, or `payload_bytes` negative.
    """
    if members < 1 or payload_bytes < 0:
        raise ValueError(f"no ring of {members} members for {payload_bytes} bytes")
    return -(-2 * (members - 1) * payload_bytes // members)
