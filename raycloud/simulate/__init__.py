"""The same order and control on a virtual clock: thousands of members, months of faults.

No Ray, no torch, no real time: `simulate(Scenario(...))` gives the same log for the same scenario.
"""

from raycloud.simulate.history import Outcome
from raycloud.simulate.run import simulate
from raycloud.simulate.scenario import Fault, Kind, Scenario, faults_by_chance, large, small

__all__ = [
    "Fault",
    "Kind",
    "Outcome",
    "Scenario",
    "faults_by_chance",
    "large",
    "simulate",
    "small",
]
