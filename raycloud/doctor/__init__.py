"""What is wrong with the machines before a run is: facts in, findings with remedies out.

Facts are gathered here for one machine, and in `on_ray.survey` for a cluster; judging them is a
table of checks without any input or output.
"""

from __future__ import annotations

from raycloud.doctor.checks import CHECKS, examine
from raycloud.doctor.facts import ClusterFacts, Facts, Gpus, Link, Machine, Node, Settings
from raycloud.doctor.findings import Level, exit_code
from raycloud.doctor.gather import facts_here

__all__ = [
    "CHECKS",
    "ClusterFacts",
    "Facts",
    "Gpus",
    "Level",
    "Link",
    "Machine",
    "Node",
    "Settings",
    "examine",
    "exit_code",
    "facts_here",
]
