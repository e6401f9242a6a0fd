"""One member's process, as the driver knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.net.stream import Place

POLL_S = 1.0  # a member that has nothing to say says so


@dataclass
class Seat:
    """A process, and what is awaited of it.

    Attributes:
        actor: Its handle.
        poll: The answer that is awaited.
        due_s: When that is due.
        again_s: When it is asked again, where it could not be reached.
        asked_anew: What is awaited was asked after it had been left out.
    """

    actor: Any
    poll: Any = None
    due_s: float = 0.0
    again_s: float = 0.0
    asked_anew: bool = False

    def ask(
        self, driver: int, place: Place | None, *, written: int = 0, wait_s: float = POLL_S
    ) -> None:
        """Ask it for its words: see `MemberActor.poll`."""
        self.poll = self.actor.poll.remote(wait_s, written, driver, place)

    def ask_anew(self, driver: int, place: Place | None, *, wait_s: float = POLL_S) -> None:
        """The same, once it has been left out."""
        self.ask(driver, place, wait_s=wait_s)
        self.asked_anew = True

    def is_back(self, driver: int, place: Place | None) -> bool:
        """Whether an answer of one that was left out shows that it is back; else it is asked anew.

        One that was asked for before may have been on its way, as from a node that hears nothing
        any more.
        """
        back = self.asked_anew
        if not back:
            self.ask_anew(driver, place, wait_s=0.0)
        return back
