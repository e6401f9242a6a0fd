"""What a ledger's file proves, what it names that is wrong, and what that takes."""

from __future__ import annotations

import time
import tracemalloc
from itertools import chain
from pathlib import Path

import pytest

from raycloud.errors import InternalError, RunDirectoryError
from raycloud.order import (
    Commit,
    Expected,
    Kind,
    Ledger,
    Position,
    audit_ledger,
    commit_record,
    growth_record,
    header_record,
    ledger_line,
    restore_record,
)
from raycloud.order.ledger_file import MOST_FAULTS

GOLDEN = Path(__file__).parent / "golden" / "ledger.jsonl"


def commit(step, start, stop, *, epoch=0, steps=1, **more):
    """Samples of the steps from `step` on."""
    return commit_record(
        Commit(
            first_step=step,
            last_step=step + steps,
            epoch=epoch,
            start=start,
            stop=stop,
            generation=0,
            **more,
        )
    )


def audit(*records, samples=10, expected=None):
    return audit_ledger(map(ledger_line, (header_record(samples), *records)), expected)


def by(steps, global_batch=4, *, drop_last=False):
    return Expected(steps=steps, global_batch=global_batch, micro_batch=2, drop_last=drop_last)


def told(found):
    return [(fault.kind.value, str(fault)) for fault in found.faults]


def test_the_golden_file_is_exact():
    lines = GOLDEN.read_text().splitlines(keepends=True)
    found = audit_ledger(lines, by(20, drop_last=False))
    assert found.exact
    assert (found.steps, found.through) == (20, Position(epoch=7, offset=4))
    assert (found.records, found.starts, found.torn) == (10, 3, False)
    assert sum(part.samples for part in found.left_out) == 9


def test_a_lost_record_is_named_with_its_steps():
    found = audit(commit(0, 0, 4), commit(2, 8, 10), commit(3, 0, 4, epoch=1))
    assert told(found) == [("missing", "epoch 0 [4, 8), steps [1, 2), seen in line 3")]


def test_what_lacks_at_the_end_is_told_by_the_log():
    records = [commit(0, 0, 4)]
    assert audit(*records).exact
    assert audit(*records, expected=by(1)).exact
    found = audit(*records, expected=by(5))
    assert told(found) == [
        ("missing", "epoch 0 [4, 10), steps [1, 3)"),
        ("missing", "epoch 1 [0, 8), steps [3, 5)"),
    ]
    assert found.through == Position(epoch=1, offset=8)


def test_what_drop_last_leaves_out_is_not_missing():
    found = audit(commit(0, 0, 4), expected=by(4, drop_last=True))
    assert told(found) == [
        ("missing", "epoch 0 [4, 8), steps [1, 2)"),
        ("missing", "epoch 1 [0, 8), steps [2, 4)"),
    ]
    assert audit(commit(0, 0, 8, steps=2, left_out=2), expected=by(2, drop_last=True)).exact


def test_steps_that_the_log_does_not_know_are_named():
    found = audit(commit(0, 0, 4), commit(1, 4, 8), expected=by(1))
    assert told(found) == [("misplaced", "steps [1, 2)")]


def test_a_record_there_twice_is_named_where_it_comes_again():
    found = audit(commit(0, 0, 4), commit(1, 4, 8), commit(0, 0, 4), commit(2, 8, 10))
    assert told(found) == [("doubled", "epoch 0 [0, 4), steps [0, 1), seen in line 4")]


def test_a_record_that_reaches_back_is_named_with_the_part_that_is_doubled():
    found = audit(commit(0, 0, 4), commit(1, 2, 6), commit(2, 8, 10))
    assert told(found) == [
        ("missing", "epoch 0 [6, 8), steps [2, 3), seen in line 4"),
        ("doubled", "epoch 0 [2, 4), steps [1, 2), seen in line 3"),
    ]


def test_records_in_another_order_prove_nothing():
    found = audit(commit(1, 4, 8), commit(0, 0, 4), commit(2, 8, 10))
    assert told(found) == [("misplaced", "epoch 0 [0, 4), steps [0, 1), seen in line 3")]
    assert found.committed_samples == 10


def test_a_part_of_each_of_several_epochs_is_named_with_its_steps():
    found = audit(commit(0, 0, 8, steps=6, epochs=3), commit(6, 0, 4, epoch=3))
    assert told(found) == [("missing", "epochs 0 to 2 [8, 10), steps [0, 7), seen in line 2")]


def test_what_a_resumed_run_takes_back_is_no_fault():
    ledger = Ledger(samples=10)
    ledger.replay(Commit(first_step=0, last_step=1, epoch=0, start=0, stop=4, generation=0))
    again = [header_record(10), restore_record(ledger.state())]
    doubled = [commit(1, 4, 8), commit(2, 4, 8)]
    assert audit(commit(0, 0, 4), *doubled, *again, commit(1, 4, 8)).exact
    assert not audit(commit(0, 0, 4), commit(0, 0, 4), *again, commit(1, 4, 8)).exact
    found = audit(commit(0, 0, 4), header_record(10), commit(1, 4, 8))  # no checkpoint is named
    assert told(found) == [("missing", "epoch 0 [0, 4), steps [0, 1), seen in line 4")]


def test_a_checkpoint_with_a_hole_is_named():
    state = Ledger(samples=10).state() | {"next_step": 2}
    state["ranges"] = [{"epoch": 0, "epochs": 1, "committed": [[0, 2], [4, 8]], "left_out": []}]
    found = audit(restore_record(state), commit(2, 8, 10))
    assert told(found) == [("missing", "epoch 0 [2, 4)")]


def test_a_torn_line_is_left_out():
    lines = [ledger_line(header_record(10)), ledger_line(commit(0, 0, 4)), '{"commit":{"fir']
    found = audit_ledger(lines)
    assert (found.exact, found.torn, found.steps) == (True, True, 1)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_ledger_of_another_job_is_refused(drop_last):
    far = growth_record(10**18, 64)
    expected = by(9, global_batch=64, drop_last=drop_last)
    if not drop_last:
        assert audit(commit(0, 0, 10), far, expected=expected).of(Kind.MISSING)
        return
    for records in ([commit(0, 0, 10)], [commit(0, 0, 10), far]):
        with pytest.raises(RunDirectoryError, match="not of this run's job"):
            audit(*records, expected=expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"next_step": "x"},
        {"next_step": -1},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [], "left_out": []}]},
        {"ranges": [{"epoch": 0, "epochs": 0, "committed": [[0, 4]], "left_out": []}]},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [[0, 11]], "left_out": []}]},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [[4, 2]], "left_out": []}]},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [[0, 4]], "left_out": [[3, 5]]}]},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [[4, 6], [0, 2]], "left_out": []}]},
        {"ranges": [{"epoch": -1, "epochs": 1, "committed": [[0, 4]], "left_out": []}]},
        {"ranges": [{"epoch": 0, "epochs": 1, "committed": [[0.5, 4]], "left_out": []}]},
        {"ranges": 2 * [{"epoch": 0, "epochs": 1, "committed": [[0, 4]], "left_out": []}]},
    ],
)
def test_a_checkpoint_that_no_ledger_comes_to_is_refused(wrong):
    state = {**Ledger(samples=10).state(), "next_step": 1, **wrong}
    with pytest.raises(RunDirectoryError, match=r"line 2 of the ledger is damaged: not "):
        audit(restore_record(state))
    ledger = Ledger(samples=10)
    with pytest.raises(InternalError, match=r"not "):
        ledger.restore(state)
    assert ledger.state() == Ledger(samples=10).state()


def long(records):
    """A header, and records of a step each, ten to an epoch."""
    steps = (commit(n, n % 10 * 8, n % 10 * 8 + 8, epoch=n // 10) for n in range(records))
    return map(ledger_line, chain([header_record(80)], steps))


def test_where_all_is_wrong_reading_ends():
    lines = long(20_000)
    found = audit_ledger(line for n, line in enumerate(lines) if n % 2 == 0)
    assert not found.whole
    assert found.records == MOST_FAULTS + 1
    assert sum(1 for _ in lines) > 10_000
    assert str(found.faults[0]) == "epochs 0 to 199 [0, 8), steps [0, 1991), seen in line 2"


@pytest.mark.full(only="a ledger of 200,000 records is audited within 20 s")
@pytest.mark.timeout(180)
def test_a_long_ledger_is_a_matter_of_seconds():
    """200,000 records, a fortnight of reports: measured 4 s of one core."""
    lines = list(long(200_000))
    started_s = time.process_time()  # others may keep the machine busy
    found = audit_ledger(iter(lines), by(200_000, 8))
    took_s = time.process_time() - started_s
    assert (found.exact, found.records, found.through) == (True, 200_000, Position(epoch=20_000))
    assert took_s < 20.0


@pytest.mark.full(only="memory of a long ledger")
def test_a_long_ledger_takes_no_more_memory_than_a_short_one():
    peaks = []
    for records in (1_000, 10_000):
        tracemalloc.start()
        assert audit_ledger(long(records)).exact
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18  # as lists of what is free the interpreter keeps some 200 kB
