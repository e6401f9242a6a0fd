"""Members start from the same parameters, or are made to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from raycloud.sync.transport import Transport, finish


def same_everywhere(digest: str, transport: Transport, abandoned: Callable[[], bool]) -> bool:
    """Whether all members gave the same digest; every member gets the same answer.

    Args:
        digest: At least 12 hexadecimal digits.
        transport: Any transport of the generation for tensors on the CPU.
        abandoned: Says that the generation is over.
    """
    if transport.size == 1:
        return True
    words = torch.tensor(
        [int(digest[:6], 16), int(digest[6:12], 16)], dtype=torch.float64
    )  # 24 bits each: sums over members stay exact
    sums = words.clone()
    finish(transport.all_reduce(sums), abandoned)
    differs = torch.tensor([float((sums != words * transport.size).any())], dtype=torch.float64)
    finish(transport.all_reduce(differs), abandoned)
    return bool(differs.item() == 0)


def take_from(
    source: int,
    tensors: Mapping[str, torch.Tensor],
    transport: Transport,
    abandoned: Callable[[], bool],
) -> None:
    """Overwrite `tensors`, in place, with those of the member of rank `source`.

    They arrive beside them and are taken once all are there: an exchange that is given up may
    still write to what it was given.

    Raises:
        TransportError: It broke, or was abandoned; nothing is taken.
    """
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _, tensor in sorted(tensors.items()):
        flat = tensor.detach().contiguous().reshape(-1).clone()
        if flat.numel():
            finish(transport.broadcast(flat, source), abandoned)
            arrived.append((tensor, flat))
    for tensor, flat in arrived:
        tensor.copy_(flat.view(tensor.shape))
