"""Who computes in a run, and where it stands, as its events tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.events import (
    ExchangeBroken,
    GenerationFormed,
    MemberLost,
    Recovered,
    StepsCommitted,
)

if TYPE_CHECKING:
    from raycloud.events import Observed


class Group:
    """The fold of a run's events that its faults are chosen by.

    Attributes:
        step: Steps that a member has said to be committed.
        recovering: A generation broke, and no step was committed since.
    """

    def __init__(self) -> None:
        """Nobody computes yet."""
        self.step = 0
        self.recovering = False
        self._generation = -1
        self._sound = -1  # the newest one that followed a broken one
        self._ranks: tuple[int, ...] = ()
        self._have_state: set[int] = set()
        self._lost: set[int] = set()

    def see(self, event: Observed) -> None:
        """Take in what happened."""
        match event:
            case GenerationFormed() if event.generation >= self._generation:
                self._generation, self._ranks = event.generation, event.members
            case StepsCommitted():
                self.step = max(self.step, event.last_step)
                if event.last_step > event.first_step:
                    self._have_state.add(event.member)
            case MemberLost():
                self._lost.add(event.member)
                self.recovering |= event.member in self._ranks
            case ExchangeBroken():
                self.recovering |= event.generation >= self._sound
            case Recovered():
                self.recovering, self._sound = False, event.generation
            case _:
                pass

    def computing(self) -> list[int]:
        """The members, by rank, that have committed steps in this process's time and are there."""
        return [m for m in self._ranks if m in self._have_state and m not in self._lost]
