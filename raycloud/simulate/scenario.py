"""What is simulated: a job, its machines, how words are delayed, and what befalls them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from raycloud.errors import SpecError


class Kind(StrEnum):
    """What may befall a run."""

    DIE = "die"  # members' processes end
    FREEZE = "freeze"  # a node's processes stand still for a while
    CUT = "cut"  # nodes are cut off one by one, and come back in another order
    BREAK = "break"  # connections between members are reset
    LEAVE = "leave"  # nodes vanish, and come back after a while
    ZONE = "zone"  # all nodes of a zone vanish, and come back after a while
    NOTICE = "notice"  # nodes or processes say that they will be gone, and then are
    HOLD = "hold"  # from now on exactly so many nodes are there
    SLOW = "slow"  # a node is slower for a while
    JUMP = "jump"  # the driver's clock jumps ahead
    DEAF = "deaf"  # the driver stands still, while members go on
    FAIL = "fail"  # a member's task raises
    FULL = "full"  # the disk of the checkpoints is full for a while
    STOP = "stop"  # someone asks the run to stop; it is resumed later
    RANGE = "range"  # the job may use another number of members from now on
    GROW = "grow"  # files are added to what is trained on


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Fault:
    """One thing that befalls the run.

    Attributes:
        at_s: When, in virtual seconds.
        kind: What.
        many: How many members or nodes it concerns; of a range, the most members.
        lasts_s: For how long; of a jump, how far.
    """

    at_s: float
    kind: Kind
    many: int = 1
    lasts_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulated job and its circumstances; the same scenario gives the same log.

    Attributes:
        seed: Of everything that is left to chance.
        members: Most members the job may use; `elastic.max_workers`.
        least: Fewest it may run with; `elastic.min_workers`.
        samples: Samples per epoch, before any are added.
        global_batch: Samples per step.
        micro_batch: Samples per micro-batch.
        drop_last: Leave out the short last step of an epoch.
        shares: `auto` or `equal`; see `ControlSettings`.
        steps: Steps to compute; None: until `lasts_s`, when a stop is asked for.
        lasts_s: Faults come until then.
        every_steps: Steps between two checkpoints; `auto`: as often as control finds them worth it;
            None: one at the end.
        faults: What befalls it.
        speeds: Seconds per micro-batch of the nodes, over and over.
        exchange_s: Seconds of a step's exchange.
        per_node: Places for members on a node.
        nodes: How many nodes there are when all are there; 0: as many as the members need.
        there: How many of them are there at the beginning; 0: all.
        zones: Nodes are dealt to so many zones.
        delay_s: A word is at most this long on its way.
        build_s: A member takes at most this long to be ready.
        spread: By so large a part of it, one may be ready earlier than another.
        stillborn: The chance that a member that joins dies before it is ready.
        report_s: Seconds between two reports of a member while something goes on; None: as long as
            in a real run of so many.
        awake_s: So long after something has happened all is simulated word by word; then reports
            are thinned out to one round before the next happening. Infinite: always.
        silence_s: See `ControlSettings`.
    """

    seed: int
    members: int
    least: int = 1
    samples: int = 50_000
    global_batch: int = 64
    micro_batch: int = 1
    drop_last: bool = False
    shares: str = "auto"
    steps: int | None = None
    lasts_s: float = 3600.0
    every_steps: int | Literal["auto"] | None = None
    faults: tuple[Fault, ...] = ()
    speeds: tuple[float, ...] = (0.1,)
    exchange_s: float = 0.05
    per_node: int = 1
    nodes: int = 0
    there: int = 0
    zones: int = 1
    delay_s: float = 0.5
    build_s: float = 20.0
    spread: float = 0.5
    stillborn: float = 0.0
    report_s: float | None = None
    awake_s: float = math.inf
    silence_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what could not be simulated.

        Raises:
            SpecError: A field is out of its range.
        """
        for field in ("members", "samples", "global_batch", "micro_batch", "per_node", "zones"):
            self._at_least(field, 1)
        for field in ("exchange_s", "delay_s", "build_s", "lasts_s", "there", "nodes"):
            self._at_least(field, 0)
        if not 1 <= self.least <= self.members:
            raise SpecError("least", self.least, f"1 to {self.members} members are possible")
        if self.steps is not None and self.steps < 1:
            raise SpecError("steps", self.steps, "a run has at least one step")
        if self.drop_last and self.samples < self.global_batch:
            raise SpecError(
                "samples",
                self.samples,
                f"no step of {self.global_batch} samples fits into an epoch",
                hint="more samples, a smaller global batch, or without drop_last",
            )
        if self.every is not None and self.every < 1:
            raise SpecError("every_steps", self.every_steps, "between checkpoints is a step")
        if not self.speeds or min(self.speeds) <= 0:
            raise SpecError("speeds", self.speeds, "a micro-batch takes seconds > 0")
        if self.nodes and self.nodes * self.per_node < self.least:
            raise SpecError("nodes", self.nodes, f"there is no place for {self.least} members")
        for field in ("stillborn", "spread"):
            if not 0 <= getattr(self, field) < 1:
                raise SpecError(field, getattr(self, field), "a part is from 0 to below 1")
        if self.report_s is not None and self.report_s <= 0:
            raise SpecError("report_s", self.report_s, "between reports is some time")

    def _at_least(self, field: str, least: int) -> None:
        value = getattr(self, field)
        if not value >= least:
            raise SpecError(field, value, f"at least {least} is needed")

    @property
    def every(self) -> int | None:
        """Steps between two checkpoints that are due by arithmetic; None: there are none."""
        return None if self.every_steps == "auto" else self.every_steps

    @property
    def machines(self) -> int:
        """How many nodes there are when all are there."""
        return self.nodes or -(-self.members // self.per_node)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full step."""
        return -(-self.global_batch // self.micro_batch)
