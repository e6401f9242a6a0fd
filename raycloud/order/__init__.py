"""The canonical sequence: positions, assignments, leases, ledger arithmetic.

A job fixes one sequence of samples from `(seed, epoch)`. Everything here is arithmetic on it: no
torch, no Ray, no clock, no I/O.
"""

from raycloud.order.assignment import Assignment, assign
from raycloud.order.commits import Audit, Commit, SampleRange, lockstep_commits
from raycloud.order.lease import Lease, LeaseBook, Settled
from raycloud.order.ledger import Ledger
from raycloud.order.ledger_text import (
    commit_record,
    header_record,
    ledger_line,
    read_ledger,
    restore_record,
)
from raycloud.order.seeds import mix, stream_seed
from raycloud.order.sequence import Order
from raycloud.order.steps import MicroBatch, Position, Steps, StepSpan

__all__ = [
    "Assignment",
    "Audit",
    "Commit",
    "Lease",
    "LeaseBook",
    "Ledger",
    "MicroBatch",
    "Order",
    "Position",
    "SampleRange",
    "Settled",
    "StepSpan",
    "Steps",
    "assign",
    "commit_record",
    "header_record",
    "ledger_line",
    "lockstep_commits",
    "mix",
    "read_ledger",
    "restore_record",
    "stream_seed",
]
