"""What a step took and did not count: in the ledger it is neither missing nor counted."""

from __future__ import annotations

import pytest

from raycloud.errors import InternalError, RunDirectoryError
from raycloud.order import (
    ERROR,
    Commit,
    Ledger,
    Skip,
    commit_record,
    header_record,
    ledger_line,
    read_ledger,
)


def commit(start, stop, *, first_step=0, last_step=1):
    return Commit(
        first_step=first_step, last_step=last_step, epoch=0, start=start, stop=stop, generation=0
    )


def skipped(start, stop, *, step=0, epoch=0):
    return Skip(step=step, epoch=epoch, start=start, stop=stop, why=ERROR)


def test_what_is_skipped_is_neither_missing_nor_counted():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 8, last_step=2))
    ledger.skip(skipped(4, 6, step=1))
    audit = ledger.audit()
    assert audit.exact
    assert audit.committed_samples == 6
    assert audit.skips == (skipped(4, 6, step=1),)
    assert str(audit) == "6 samples committed; skipped: epoch 0 [4, 6), step 1, error"
    assert Ledger.from_state(ledger.state()).audit() == audit
    ledger.restore(Ledger(samples=10).state())
    assert ledger.skips == ()


@pytest.mark.parametrize(
    ("skip", "why"),
    [
        (skipped(6, 9), "no step has taken"),
        (skipped(0, 2, epoch=1), "no step has taken"),
        (skipped(0, 2, step=2), "no step has taken"),
        (skipped(3, 5), "skipped twice"),
        (skipped(5, 7), "skipped twice"),
        (skipped(4, 6, step=1), "skipped twice"),
    ],
    ids=str,
)
def test_what_cannot_have_been_skipped_is_refused_and_changes_nothing(skip, why):
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 8, last_step=2))
    ledger.skip(skipped(4, 6))
    before = ledger.state()
    with pytest.raises(InternalError, match=why):
        ledger.skip(skip)
    assert ledger.state() == before


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"step": 0, "epoch": 0, "start": 0, "stop": 2},
        {"step": 0, "epoch": 0, "start": 0, "stop": 2, "why": "no"},
        {"step": 0, "epoch": 0, "start": 2, "stop": 2, "why": "nan"},
        {"step": -1, "epoch": 0, "start": 0, "stop": 2, "why": "nan"},
        {"step": True, "epoch": 0, "start": 0, "stop": 2, "why": "nan"},
        {"step": 0, "epoch": 0, "start": 0, "stop": 99, "why": "nan"},
    ],
    ids=str,
)
def test_a_skip_that_is_none_is_damage(record):
    lines = [ledger_line(header_record(10)), ledger_line(commit_record(commit(0, 8)))]
    with pytest.raises(RunDirectoryError, match=r"line 3 of the ledger is damaged"):
        read_ledger([*lines, ledger_line({"skip": record})])
    state = {**Ledger(samples=10).state(), "skips": [record]}
    with pytest.raises(InternalError):
        Ledger.from_state(state)
