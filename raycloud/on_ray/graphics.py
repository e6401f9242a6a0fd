"""The GPUs that torch sees in this process."""

from __future__ import annotations

from raycloud.doctor.facts import Gpus
from raycloud.doctor.gather import gpu_devices


def gpus_here(handed_out: float | None = None) -> Gpus:
    """GPUs by the word of the driver, of torch and of Ray.

    Torch is imported only where somebody speaks of GPUs: it takes seconds.

    Args:
        handed_out: How many Ray hands out here; None without Ray.
    """
    driver = gpu_devices()
    if not (driver or handed_out):
        return Gpus(ray=handed_out)
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(torch.cuda.get_device_name(number) for number in range(seen))
    return Gpus(driver=driver, torch=seen, ray=handed_out, names=names)
