"""What a member is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.data.index import Input
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What a member is told at its start.

    `address` is this node's address that peers can reach. `checkpoints` is where they are kept, and
    `mark` what shows that all members see that place (empty: they share a node);
    `resume_step` names the one to start from, None for the beginning. `pipeline` is the name that
    the run's members find their data's pipeline by, and `home` the node that it is on, the
    driver's; `known` are the inputs that the run has read before, in their order. `collators` are
    the names of the processes that make batches in the members' place. `only_steps` ends it after
    so many steps, whatever the job's length, which the task's schedule is made for all the same.
    One that `joins` takes its state from the others, who began with the checkpoint `origin`; where
    nobody is left who has it, all are going to load the checkpoint of step `back` together.
    `price_per_hour` is what this node is labelled to cost. `speed` are the
    seconds of T(b), as in `MemberReady`, of the member whose place it has taken; None: it has to
    find out its own.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    member: int
    node: str
    address: str
    job: Job
    checkpoints: str
    mark: str = ""
    resume_step: int | None = None
    only_steps: int | None = None
    pipeline: str = ""
    known: tuple[Input, ...] = ()
    home: str = ""
    price_per_hour: float | None = None
    collators: tuple[str, ...] = ()
    joins: bool = False
    origin: Manifest | None = None
    back: int | None = None
    speed: tuple[float, float] | None = None
