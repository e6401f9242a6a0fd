"""Which cloud this machine is in.

Found in what the firmware says of the machine, which Linux shows as files: nobody is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from raycloud.bounded import read_whole
from raycloud.errors import SpecError
from raycloud.preemption.aws import Aws
from raycloud.preemption.azure import Azure
from raycloud.preemption.google import Google
from raycloud.preemption.metadata import MetadataServer

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.preemption.leaving import Leaving

DMI = Path("/sys/class/dmi/id")
VARIABLE = "RAYCLOUD_CLOUD"
_MOST_BYTES = 2**16  # such a file claims a page of memory
# What Azure writes there on all of its machines, and Hyper-V elsewhere does not.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


class Cloud(Protocol):
    """Who can be asked whether this machine is going to leave.

    Attributes:
        name: As it is written in `RAYCLOUD_CLOUD`.
        every_s: Seconds from one question to the next.
    """

    name: str
    every_s: float

    def leaving(self) -> Leaving | None:
        """Whether it is.

        Raises:
            MachineError: There is no answer, or none that makes sense.
        """
        ...


CLOUDS: Mapping[str, type[Aws | Google | Azure]] = {
    kind.name: kind for kind in (Aws, Google, Azure)
}


def cloud_here(clock: Clock, asked: str | None = None, dmi: Path = DMI) -> Cloud | None:
    """The cloud that this machine is in; None: it is in none, or is not to ask. Asks nobody.

    Args:
        clock: For the answers.
        asked: What `RAYCLOUD_CLOUD` says; None: look.
        dmi: Where the firmware's words are.

    Raises:
        SpecError: `asked` is no cloud.
    """
    name = name_of(dmi) if asked is None else asked
    if name is None or name == "none":
        return None
    if name not in CLOUDS:
        raise SpecError(
            VARIABLE,
            name,
            "is no cloud whose notices can be read",
            hint=f"write {', '.join(CLOUDS)} or none, or leave it out",
        )
    return CLOUDS[name](MetadataServer(clock), clock)


def name_of(dmi: Path) -> str | None:
    """The cloud that the firmware names; None: none of those that can be asked."""
    if "Amazon EC2" in (_text(dmi / "sys_vendor"), _text(dmi / "board_vendor")):
        return Aws.name
    if "amazon" in _text(dmi / "bios_version").lower():  # machines on Xen
        return Aws.name
    if _text(dmi / "product_name") == "Google Compute Engine":
        return Google.name
    if _text(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return Azure.name
    return None


def _text(path: Path) -> str:
    try:
        return read_whole(path, _MOST_BYTES).decode("ascii", errors="replace").strip()
    except (OSError, ValueError):  # no firmware, or one that says nothing
        return ""
