"""The canonical sequence: positions, assignments, leases, ledger arithmetic.

A job fixes one sequence of samples from `(seed, epoch)`. Everything here is arithmetic on it: no
torch, no Ray, no clock, no I/O.
"""

from raycloud.order.assignment import PARTS, Assignment, assign, deal, prefer, whole_shares
from raycloud.order.commits import (
    ERROR,
    NAN,
    Audit,
    Commit,
    SampleRange,
    Skip,
    lockstep_commits,
    skip_of,
)
from raycloud.order.layout import Layout, lanes_of
from raycloud.order.lease import Lease, LeaseBook, Settled
from raycloud.order.ledger import Ledger
from raycloud.order.ledger_file import (
    Expected,
    Fault,
    Kind,
    LedgerAudit,
    audit_ledger,
    commit_record,
    growth_record,
    header_record,
    ledger_line,
    read_ledger,
    restore_record,
    skip_record,
)
from raycloud.order.rounds import Round, RoundEnds, round_at
from raycloud.order.seeds import mix, stream_seed
from raycloud.order.sequence import Order
from raycloud.order.steps import EpochSizes, MicroBatch, Position, Steps, StepSpan

__all__ = [
    "ERROR",
    "NAN",
    "PARTS",
    "Assignment",
    "Audit",
    "Commit",
    "EpochSizes",
    "Expected",
    "Fault",
    "Kind",
    "Layout",
    "Lease",
    "LeaseBook",
    "Ledger",
    "LedgerAudit",
    "MicroBatch",
    "Order",
    "Position",
    "Round",
    "RoundEnds",
    "SampleRange",
    "Settled",
    "Skip",
    "StepSpan",
    "Steps",
    "assign",
    "audit_ledger",
    "commit_record",
    "deal",
    "growth_record",
    "header_record",
    "lanes_of",
    "ledger_line",
    "lockstep_commits",
    "mix",
    "prefer",
    "read_ledger",
    "restore_record",
    "round_at",
    "skip_of",
    "skip_record",
    "stream_seed",
    "whole_shares",
]
