"""What control is told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raycloud.errors import CheckpointError, InternalError
from raycloud.events import SyncPoint
from raycloud.order import EpochSizes, Ledger, Position, Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSettings:
    """Everything control knows before the first event.

    Attributes:
        min_workers: Fewest members the job may run with.
        max_workers: Most members the job may use.
        capacity: How many members the machines hold now.
        global_batch: Samples per step.
        micro_batch: Samples per micro-batch.
        drop_last: Leave out the short last step of an epoch.
        shares: Micro-batches per step and member: `auto` fits them to measured speed and goes on
            doing so, `equal` deals them evenly, a list is taken as it is.
        reshare_every_s: Least seconds between two looks at the shares.
        reshare_steps: Least steps between two looks at the shares.
        reshare_gain: A change of shares is worth this fraction of a step's seconds.
        spawn_s: A member that is not ready after this time is lost.
        others_s: Who is ready at the start waits so long for the others, and at least a fifth of
            what it took itself; if they are enough then, they begin, and the others join. Infinite:
            all begin together.
        form_s: Members that have not met after this time are lost.
        silence_s: A member in training that has nothing to report for this time is lost.
        late_s: A member is lost if its answer to a call comes this much later than due, and later
            than is usual for it, where the job can go on without it.
        several_s: The same where members on several machines do not answer.
        several_cut_s: The same where the machines acknowledge nothing, and those of as many others
            do.
        outage_s: The same where those are more than do answer: the driver is rather cut off itself.
        restore_s: What going on from a checkpoint takes, beside computing what came after it.
        return_s: A member that is lost because it does not answer keeps its process and its place
            for this time, if nobody else has taken its part before.
        still_s: A member is lost that has used no processor time for this long while it was to
            compute, where another one has the state.
        answer_s: A call is answered after this time, or before.
        broken_s: From the first word of a broken exchange to a new meeting, if nobody is found to
            be lost meanwhile; less where all have answered a call since.
        hand_over_s: All wait less than this for those that join to take the state, or twice that
            where these compute as long in three steps; else they follow until they have it.
        meetings: So often the same members meet anew without a step between; then the one whose
            exchange broke is lost. After so many meetings that did not come about, it is not always
            the one that is new who is lost.
        losing: After so many generations in a row that lost members, without a step between, or
            more of the step than before, the run ends: the step itself seems to be what ends them.
            So it does where all are lost, and so many returns to a checkpoint did not come further
            than was come before, nor to a later checkpoint.
        gather_s: Where nobody is left, the first new ones wait this long for others that have a
            place: they load the checkpoint together.
        keep_s: Where a member fails, the parts of a checkpoint that others write are waited for so
            long, and until it is published.
        most_failed: So many checkpoints in a row that cannot be kept end the run.
        exact: Gradients travel as they are, where `sync: auto` would encode them.
        auto_period: Steps of the longest round that `sync: auto` could choose; 1: it makes none.
        saves: Checkpoints are asked for when they are worth it (see `saving`).
        sync: By which point the job says that updates travel.
        in_force: By which they did when the run was ended, where that is another.
        tour: Points to be measured in the run, which goes on with the fastest.
        toured: They have been, before this start: only where links change they are again.
        warm_steps: So many come before there are rounds.
        reads: After multiples of these steps members measure, or write a checkpoint.
        measures: After multiples of these steps they measure; 0: never, or they always write, too.
        job_steps: Of the whole job; None: as many as its `epochs` have, or it is not known.
        epochs: Of the whole job; None: likewise.
        step: The first step to compute; more than 0 if the run goes on from a checkpoint.
        position: Where the sequence stands before `step`.
        ledger: The checkpoint's `Ledger.state()`; None if nothing is committed yet.
        first_generation: Number of the first generation that this start forms.
        first_member: Number of the first member that this start spawns.
    """

    min_workers: int
    max_workers: int
    capacity: int
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    shares: Literal["auto", "equal"] | tuple[int, ...] = "auto"
    reshare_every_s: float = 2.0
    reshare_steps: int = 4
    reshare_gain: float = 0.05
    spawn_s: float = 300.0
    others_s: float = 3.0
    form_s: float = 60.0
    silence_s: float = 60.0
    late_s: float = 1.25
    several_s: float = 1.75  # TCP sends what was lost again after 0.2, 0.6 and 1.4 s
    several_cut_s: float = 0.35
    outage_s: float = 10.0
    restore_s: float = 5.0
    return_s: float = 90.0
    still_s: float = 2.0
    answer_s: float = 1.0
    broken_s: float = 3.0
    hand_over_s: float = 0.25
    meetings: int = 3
    losing: int = 8
    gather_s: float = 2.0
    keep_s: float = 30.0
    most_failed: int = 10
    exact: bool = True
    auto_period: int = 1
    saves: bool = False
    sync: SyncPoint = field(default_factory=SyncPoint)
    in_force: SyncPoint | None = None
    tour: tuple[SyncPoint, ...] = ()
    toured: bool = False
    warm_steps: int = 0
    reads: tuple[int, ...] = ()
    measures: int = 0
    job_steps: int | None = None
    epochs: int | None = None
    step: int = 0
    position: Position = field(default_factory=Position)
    ledger: Mapping[str, Any] | None = None
    first_generation: int = 0
    first_member: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other; what a job may ask, `spec` has seen to.

        Raises:
            CheckpointError: The checkpoint's ledger ends elsewhere than its position.
            InternalError: Something that only raycloud itself could get wrong.
        """
        if not 1 <= self.min_workers <= self.max_workers:
            raise InternalError(f"not a range of workers: {self.min_workers}..{self.max_workers}")
        if (self.step > 0) != (self.ledger is not None):
            raise InternalError(
                f"a run that goes on at step {self.step} needs the ledger of its checkpoint, and "
                "only such a run has one"
            )
        ledger = None if self.ledger is None else Ledger.from_state(self.ledger)
        at, ends = self.position, Position() if ledger is None else ledger.newest
        if ledger is not None and at.offset >= ledger.samples_in(at.epoch):
            at = Position(epoch=at.epoch + 1)
        if at != ends:
            raise CheckpointError(
                f"the checkpoint of step {self.step} stands at {at}, but its ledger ends at {ends}",
                hint="resume from another checkpoint",
            )

    @property
    def workers(self) -> int:
        """How many members are spawned."""
        return max(self.min_workers, min(self.max_workers, self.capacity))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full step; the last may be short."""
        return -(-self.global_batch // self.micro_batch)

    def steps(self, samples: int) -> Steps:
        """The cut of the sequence by members that see `samples` samples.

        Where those are more than the checkpoint knows of, the data has grown since, and the first
        epoch that begins where this start goes on, or after it, has them all.

        Raises:
            ValueError: There are fewer, or too few for a step.
        """
        sizes = EpochSizes(samples)
        if self.ledger is not None:
            sizes = EpochSizes.from_state(self.ledger).grown(self.position.next_epoch, samples)
        return Steps(
            samples=sizes.samples,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            drop_last=self.drop_last,
            later=sizes.later,
        )
