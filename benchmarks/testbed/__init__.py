"""Several machines on one Linux box: own addresses, limited links and processors, real faults."""

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.ground import MissingError, missing, sweep
from benchmarks.testbed.groups import QuotaError
from benchmarks.testbed.machine import Machine, MachineError, Traffic
from benchmarks.testbed.process import Process
from benchmarks.testbed.shell import LateError, ToolError
from benchmarks.testbed.spec import NodeSpec, Spec, SpecError, TrunkSpec

__all__ = [
    "LateError",
    "Machine",
    "MachineError",
    "MissingError",
    "NodeSpec",
    "Process",
    "QuotaError",
    "Spec",
    "SpecError",
    "Testbed",
    "ToolError",
    "Traffic",
    "TrunkSpec",
    "missing",
    "sweep",
]
