"""The scenario and the rows of the ablation, as values. Fixed before the first run.

Four nodes of 0.8, 0.4, 0.2 and 0.2 cores, two in each of two zones, a thin and long trunk between.
Images come over HTTP from the head, whose rate is limited. The fastest node falls to a quarter of
its speed for 20 s. A small ResNet is trained until it tells four of ten images apart rightly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.testbed import NodeSpec, Spec
from benchmarks.testbed.spec import TrunkSpec

CORES = (0.8, 0.4, 0.2, 0.2)
ZONES = "abab"  # in the order of arrival
ZONE_LABEL = "ray.io/availability-zone"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows have in common.

    Attributes:
        trunk_mbit: Of the link between the zones; `delay_s` is one way.
        images_mbit: Of all images that the head sends.
        images: To train on.
        batch: Samples of a step, of all workers.
        micro_batch: What BatchNorm sees at once.
        steps: Of the schedule of the learning rate.
        look: Steps from one evaluation to the next.
        accuracy: The target.
        slow_s: The fastest node is slow from the first to the second, counted from the first step.
        slow_cores: Its cores then.
        limit_s: From the first step on; then a run is over.
        price: Of a core's hour.
    """

    trunk_mbit: float = 20.0
    delay_s: float = 0.04
    images_mbit: float = 20.0
    images: int = 10_000
    batch: int = 256
    micro_batch: int = 16
    steps: int = 300
    look: int = 10
    accuracy: float = 0.4
    slow_s: tuple[float, float] = (20.0, 40.0)
    slow_cores: float = 0.2
    limit_s: float = 420.0
    start_s: float = 180.0
    price: float = 0.05

    def quick(self) -> Setting:
        """The same, short: does it work?"""
        return replace(
            self, images=512, batch=32, micro_batch=8, look=2, accuracy=0.08, limit_s=60.0,
            slow_s=(0.5, 1.0),
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "slow_s": [*self.slow_s], "cores": [*CORES], "zones": ZONES}

    def spec(self, *, zones_known: bool) -> Spec:
        """The testbed. Where zones are not known, Ray's nodes are all in one."""
        labels = {} if zones_known else {ZONE_LABEL: "one"}
        nodes = tuple(
            NodeSpec(name=f"n{number}", cores=cores, zone=zone, labels=labels)
            for number, (cores, zone) in enumerate(zip(CORES, ZONES, strict=True), 1)
        )
        rate = self.trunk_mbit * 1e6
        trunk = TrunkSpec(zones=("a", "b"), rate_bits_per_s=rate, delay_s=self.delay_s)
        return Spec(nodes=nodes, trunks=(trunk,))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Which strategies a run has.

    Attributes:
        allocation: Shares follow measured speed, else they are equal.
        data: Images are read once, decoded, kept as blocks and spread evenly by class; else each is
            fetched when it is needed.
        communication: `sync: auto`, else the exact exchange of fp32.
        scheduling: Zones are known, so that a ring or tree crosses the trunk once each way; and who
            is ready begins, the others join.
        peer: Ray Train, as documented, without any of these.
    """

    allocation: bool = False
    data: bool = False
    communication: bool = False
    scheduling: bool = False
    peer: bool = False


NONE, ALL = Row(), Row(allocation=True, data=True, communication=True, scheduling=True)
STRATEGIES = ("allocation", "data", "communication", "scheduling")
ROWS: Mapping[str, Row] = {
    "baseline": NONE,
    **{f"+ {name}": replace(NONE, **{name: True}) for name in STRATEGIES},
    "all": ALL,
    **{f"all but {name}": replace(ALL, **{name: False}) for name in STRATEGIES},
    "Ray Train": Row(peer=True),
}
