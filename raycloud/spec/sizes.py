"""Sizes of what travels, how often it does, and how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAIR = 2  # so many members, or zones, send each other all they have: see `net.exchange`
_REPORTS_PER_S = 50.0  # that a driver hears at most, of all members together
_BUCKETS = 8
_LEAST_BUCKET_BYTES = 1024 * 1024
_LARGEST_BUCKET_BYTES = 4 * 1024 * 1024
_LARGEST_ON_GPU_BYTES = 25 * 1024 * 1024  # as of PyTorch's DistributedDataParallel


def bucket_bytes(gradient_bytes: int, *, on_gpu: bool = False) -> int:
    """Bytes of gradient that travel as one message, where the job leaves it open.

    Messages leave while the last backward pass runs, all but the last one, which nothing hides: so
    it is an eighth of the gradient. But each costs processor time however small it is, and more
    than a few MiB gain nothing; on a GPU, whose links are faster and whose exchanges cost more to
    begin, than 25.

    >>> [bucket_bytes(mib * 2**20) // 2**20 for mib in (1, 16, 1000)]
    [1, 2, 4]
    >>> bucket_bytes(1000 * 2**20, on_gpu=True) // 2**20
    25
    """
    largest = _LARGEST_ON_GPU_BYTES if on_gpu else _LARGEST_BUCKET_BYTES
    return min(max(gradient_bytes // _BUCKETS, _LEAST_BUCKET_BYTES), largest)


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


def tree_bytes(payload_bytes: int, code_bytes: int, zones: Sequence[int]) -> tuple[int, int]:
    """Bytes that each member sends, on average, and that each zone sends to others, by a tree.

    Z zones have so many members each, N in all. Inside a zone of n members M bytes of payload and C
    of codes are sent n - 1 times, where there are two zones and a codec those of both; each zone
    sends 2 (Z - 1) / Z * C to the others.

    >>> tree_bytes(1000, 100, [2, 2]), tree_bytes(1000, 100, [2, 1, 1]), tree_bytes(99, 10, [1] * 4)
    ((650, 100), (375, 134), (15, 15))
    """
    coded_pair = len(zones) == PAIR and code_bytes < payload_bytes
    told = PAIR * code_bytes if coded_pair else code_bytes
    inside = (sum(zones) - len(zones)) * (payload_bytes + told)
    across = 2 * (len(zones) - 1) * code_bytes
    return -(-(inside + across) // sum(zones)), -(-across // len(zones))


def served_bytes(code_bytes: int, workers: Sequence[int], servers: Sequence[int]) -> int:
    """Bytes that the busiest node sends, of nodes with so many workers and servers that sum.

    Each of N workers sends 1 / S of its C bytes to each of S servers, and each of these as much to
    every worker; what stays on a node costs nothing. Of n nodes with a worker and a server each
    that is 2 (n - 1) / n * C, as in a ring; of k with servers alone n / k * C, and C of the others.

    >>> served_bytes(1000, [1] * 4, [1] * 4)
    1500
    >>> [served_bytes(1000, [1] * 4 + [0] * k, [0] * 4 + [1] * k) for k in (2, 4, 8)]
    [2000, 1000, 1000]
    """
    n, s = sum(workers), sum(servers)
    pairs = zip(workers, servers, strict=True)
    return max(-(-code_bytes * (w * (s - own) + own * (n - w)) // s) for w, own in pairs)


def least_servers(workers: int) -> int | None:
    """Nodes that have to have a server and no worker, so that servers send less than a ring.

    There max(1, N / k) C < 2 (N - 1) / N C; None where no number will do.

    >>> [least_servers(n) for n in (1, 2, 3, 4, 8, 32)]
    [None, None, 3, 3, 5, 17]
    """
    return workers * workers // (2 * (workers - 1)) + 1 if workers > 2 else None  # noqa: PLR2004 - as above


def report_s(members: int) -> float:
    """Seconds between two reports of steps by one of N members: one, and more where they are many.

    So a driver hears at most 50 reports a second, however many members there are.

    >>> report_s(8), report_s(5000)
    (1.0, 100.0)
    """
    return max(1.0, members / _REPORTS_PER_S)


# Of an fp32 value: int8 has a scale and an offset for 256 values, int4 one for 32, or for 128 where
# it is encoded once; topk log2(ratio) and two bits for one value, and four bytes for 64 of them.
_CODED = {"none": 1.0, "bf16": 1 / 2, "int8": 264 / 1024, "int4": 20 / 128}
_CODED_BY_PAIR = _CODED | {"int4": 68 / 512}


def coded_bytes(
    payload_bytes: int, codec: str, ratio: int | None = None, *, pair: bool = False
) -> int:
    """Bytes of so much fp32 gradient on its way through a codec.

    Args:
        payload_bytes: Of the gradient.
        codec: Its name.
        ratio: Of how many values `topk` sends one; None: it is another codec.
        pair: Two members, or zones, exchange, and encode once.

    >>> coded_bytes(1024, "int4"), coded_bytes(1024, "bf16"), coded_bytes(2**20, "topk", 32)
    (160, 512, 7680)
    >>> coded_bytes(1024, "int4", pair=True)
    136
    """
    if ratio is not None:
        return math.ceil(payload_bytes * (math.log2(ratio) + 2.5) / (32 * ratio))
    return math.ceil(payload_bytes * (_CODED_BY_PAIR if pair else _CODED)[codec])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRate:
    """How fast a source was read, by some of its files.

    Attributes:
        files: How many there are.
        bytes: All of them.
        latency_s: From asking for a file until its first byte is there.
        bytes_per_s: Of all readers together, once files are open.
        readers: That read at once.
    """

    files: int
    bytes: int
    latency_s: float
    bytes_per_s: float
    readers: int

    def seconds(self) -> float:
        """Of reading all of it once.

        >>> rate = SourceRate(files=20, bytes=8_000_000, latency_s=0.1, bytes_per_s=1e6, readers=2)
        >>> rate.seconds()
        9.0
        """
        return self.files * self.latency_s / self.readers + self.bytes / self.bytes_per_s
