"""Recovery: what befell the members since their last step, and why the run fails if it does.

What is remembered here changes here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.events import Recovered

if TYPE_CHECKING:
    from raycloud.commands import Back
    from raycloud.events import ExchangeBroken, StepNotFinite

_REMEDY = "lower the learning rate, set clip_norm, or look at the samples of these steps"


@dataclass(kw_only=True, slots=True)
class Incident:
    """A generation broke, and no step is committed since.

    Attributes:
        detected_s: When it was known, from the job's start.
        cause: The reason of the first loss, or of the broken exchange.
        back: The checkpoint that all load before they meet, where nobody has had the state any
            more; None: those that are left go on in place, or it is not found yet.
        found_s: When it was found.
        lost_steps: How many steps that takes back.
        failures: How often members have failed by an error of their own since, each incident once.
        followed: Members that may have had a part of a state, and are not as they began.
    """

    detected_s: float
    cause: str
    lost: list[int] = field(default_factory=list)
    back: Back | None = None
    found_s: float = 0.0
    lost_steps: int = 0
    failures: int = 0
    followed: tuple[int, ...] = ()

    @property
    def begins(self) -> bool:
        """There is no checkpoint: all begin at the beginning, and have to be new."""
        return self.back is not None and self.back.step == 0


@dataclass(kw_only=True, slots=True)
class Recovery:
    """How the job gets over the loss of members, of an exchange, or of a sound state.

    Attributes:
        started_s: When the job was started.
        incident: What befell members since the last step of all; None: nothing.
        broken: The first word of an exchange of the present group that broke; None: none did.
        broken_s: When it came.
        meetings: How often the present group has met since its last step.
        losing: How many generations in a row lost members, without a step between, or more of the
            step under way than ever before.
        kept: The most micro-batches of the step under way that members had when they met; None:
            they have not met in it.
        unmet: How many meetings in a row did not come about.
        called_s: When members were last called to meet.
        not_finite: The first word of a step for which all are to go back; until they do.
        left_out: Steps that change nothing when they are computed again.
        error: Why the run fails.
        blames: The error that its caller gets, by name, where no member has failed or is lost.
        failed_s: When the first member told that it failed; None: none has.
    """

    started_s: float = 0.0
    incident: Incident | None = None
    broken: ExchangeBroken | None = None
    broken_s: float = 0.0
    meetings: int = 1
    losing: int = 0
    kept: int | None = None
    unmet: int = 0
    called_s: float = 0.0
    not_finite: StepNotFinite | None = None
    left_out: set[int] = field(default_factory=set)
    error: str = ""
    blames: str = "JobError"
    failed_s: float | None = None

    @property
    def back(self) -> Back | None:
        """The checkpoint that members load before they meet; None: none, or it is not found."""
        return None if self.incident is None else self.incident.back

    def start(self, now_s: float) -> None:
        """The job starts."""
        self.started_s = now_s

    def take_over(self, began_s: float, cause: str, lost: list[int]) -> None:
        """Members have outlived their driver, and are about to meet for the first time."""
        self.started_s, self.meetings = began_s, 0
        self.incident = Incident(detected_s=0.0, cause=cause, lost=lost)

    def fail(self, error: str, blames: str = "JobError") -> None:
        """Why the run fails, if nothing gets over it; of the first member that failed it stays."""
        if self.failed_s is None:
            self.error, self.blames = error, blames

    def end(self, now_s: float) -> None:
        """A member has failed: the run ends."""
        self.failed_s = now_s

    def get_over(self) -> None:
        """Those that are left go on."""
        self.error = ""

    def note_broken(self, event: ExchangeBroken, now_s: float) -> None:
        """A member cannot exchange with the others; the first to say so counts.

        But where it is a server that one cannot reach, others may only see that one go.
        """
        if self.broken is None:
            self.broken, self.broken_s = event, now_s
        elif event.server:
            self.broken = event

    def note_lost(self, member: int, cause: str, now_s: float) -> None:
        """A member of the generation is lost."""
        known_s = now_s if self.broken is None else self.broken_s
        self._incident(known_s, cause).lost.append(member)

    def note_not_finite(self, event: StepNotFinite) -> bool:
        """A member says that all are to go back; False: another one has."""
        if self.not_finite is not None:
            return False
        self.not_finite = event
        if event.left_out is not None:
            self.left_out.add(event.left_out)
        self.fail(f"{event.why}\n\nhint: {_REMEDY}")
        return True

    def note_failure(self) -> None:
        """A member failed by an error of its own while nobody has the state."""
        if self.incident is not None:
            self.incident.failures += 1

    def forgive_failures(self) -> None:
        """There is another machine, which may do."""
        if self.incident is not None:
            self.incident.failures = 0

    def call(self, now_s: float, *, same: bool, met: bool, lost: bool, apart_s: float) -> None:
        """Members are called to meet.

        Args:
            now_s: When.
            same: They are those of the meeting before.
            met: That meeting had come about.
            lost: Somebody who had the state is lost.
            apart_s: What happens so soon after the call before is the same incident.
        """
        self.meetings = self.meetings + 1 if same else 1
        if met or now_s - self.called_s >= apart_s:
            self.losing += lost
            self.unmet = 0 if met else self.unmet + 1
        self.called_s = now_s
        if self.broken is not None:
            self._incident(self.broken_s, self.broken.why)
        self.broken = None
        if met and self.incident is not None:
            self.incident.back = None  # whoever was there has gone back

    def progress(self) -> None:
        """A step was reported by the present group."""
        self.meetings, self.losing, self.kept = 1, 0, None

    def note_met(self, kept: int) -> None:
        """Members have met, and have so many micro-batches of the step under way.

        A step may take longer than machines stay, and comes to its end all the same: what those
        that are left have is kept. Where it ends whoever computes a part of it, that part is never
        there.
        """
        if self.kept is not None and kept > self.kept:
            self.losing = 0
        self.kept = max(kept, self.kept or 0)

    def look_for_checkpoint(self, followed: tuple[int, ...], now_s: float) -> None:
        """Nobody has a sound state: the newest checkpoint is looked for."""
        cause = self.error if self.not_finite is None else self.not_finite.why
        incident = self._incident(now_s, cause)
        incident.back, incident.followed = None, followed
        self.broken = None
        self.get_over()

    def go_back(self, back: Back, lost_steps: int, now_s: float) -> None:
        """This is the checkpoint: steps after it do not count any more."""
        if self.incident is not None:
            self.incident.back, self.incident.found_s = back, now_s
            self.incident.lost_steps += lost_steps
        self.not_finite = None

    def gather(self, now_s: float) -> None:
        """Members are called to meet and to load the checkpoint."""
        self.meetings, self.losing, self.unmet, self.kept = 1, 0, 0, None
        self.called_s = now_s

    def recovered(self, generation: int, now_s: float) -> Iterator[Recovered]:
        """Training goes on: to tell, where something had happened."""
        incident, self.incident = self.incident, None
        if incident is not None:
            yield Recovered(
                generation=generation,
                lost=tuple(incident.lost),
                cause=incident.cause,
                detected_s=incident.detected_s,
                resumed_s=now_s - self.started_s,
                lost_steps=incident.lost_steps,
            )

    def _incident(self, known_s: float, cause: str) -> Incident:
        """The present one, or a new one."""
        if self.incident is None:
            self.incident = Incident(detected_s=known_s - self.started_s, cause=cause)
        return self.incident
