"""The ledger: what it refuses, what its audit names, and the text of its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycloud.errors import InternalError, RunDirectoryError
from raycloud.order import (
    ERROR,
    NAN,
    Commit,
    Ledger,
    Position,
    SampleRange,
    Skip,
    Steps,
    commit_record,
    growth_record,
    header_record,
    ledger_line,
    lockstep_commits,
    read_ledger,
    restore_record,
    skip_record,
)

GOLDEN = Path(__file__).parent / "golden" / "ledger.jsonl"
FORMAT_2 = GOLDEN.with_name("ledger-format-2.jsonl")  # before samples were skipped
FORMAT_1 = GOLDEN.with_name("ledger-format-1.jsonl")  # as raycloud 0.1 wrote it


def commit(start, stop, *, epoch=0, first_step=0, last_step=1, **more):
    return Commit(
        first_step=first_step,
        last_step=last_step,
        epoch=epoch,
        start=start,
        stop=stop,
        generation=0,
        **more,
    )


def test_a_new_ledger_misses_nothing():
    audit = Ledger(samples=10).audit()
    assert audit.exact
    assert str(audit) == "0 samples committed"


def test_a_doubled_range_is_refused_by_name_and_changes_nothing():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 6))
    before = ledger.state()
    with pytest.raises(InternalError, match=r"steps \[1, 2\) .* twice: epoch 0 \[4, 6\)"):
        ledger.commit(commit(4, 8, first_step=1, last_step=2))
    assert ledger.state() == before


def test_a_left_out_tail_cannot_be_committed_later():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 8, left_out=2))
    with pytest.raises(InternalError, match=r"twice: epoch 0 \[8, 10\)"):
        ledger.commit(commit(8, 10))


@pytest.mark.parametrize(
    "bad", [commit(-1, 2), commit(4, 2), commit(8, 12), commit(8, 10, left_out=1)]
)
def test_a_range_outside_the_epoch_is_refused(bad):
    with pytest.raises(InternalError, match="not a range of an epoch of 10 samples"):
        Ledger(samples=10).commit(bad)


def test_the_audit_names_holes_below_the_newest_position_only():
    ledger = Ledger(samples=10)
    ledger.commit(commit(2, 4))
    ledger.commit(commit(6, 8, epoch=2))
    audit = ledger.audit()
    assert not audit.exact
    assert audit.missing == (
        SampleRange(epoch=0, start=0, stop=2),
        SampleRange(epoch=0, start=4, stop=10),
        SampleRange(epoch=1, start=0, stop=10),
        SampleRange(epoch=2, start=0, stop=6),
    )
    assert "24 missing: epoch 0 [0, 2), epoch 0 [4, 10), epoch 1 [0, 10)" in str(audit)


def test_the_audit_can_ask_for_more_than_is_there():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 10))
    missing = ledger.audit(through=Position(epoch=3, offset=4)).missing
    assert [str(r) for r in missing] == ["epochs 1 to 2 [0, 10)", "epoch 3 [0, 4)"]


def test_left_out_is_not_missing():
    steps = Steps(samples=10, global_batch=4, micro_batch=2, drop_last=True)
    ledger = Ledger(samples=10)
    for c in lockstep_commits(steps, at=Position(), first_step=0, last_step=5, generation=0):
        ledger.commit(c)
    audit = ledger.audit()
    assert audit.exact
    assert [str(r) for r in audit.left_out] == ["epochs 0 to 1 [8, 10)"]
    assert ledger.newest == Position(epoch=2, offset=4)


def test_a_tail_that_the_resumed_cut_cannot_use_is_left_out():
    steps = Steps(samples=10, global_batch=4, micro_batch=2, drop_last=True)
    commits = lockstep_commits(
        steps, at=Position(offset=7), first_step=3, last_step=4, generation=0
    )
    assert [(c.epoch, c.start, c.stop, c.left_out) for c in commits] == [(0, 7, 7, 3), (1, 0, 4, 0)]
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 7))
    for c in commits:
        ledger.commit(c)
    assert ledger.audit().exact


def test_a_million_epochs_stay_small():
    steps = Steps(samples=3, global_batch=3, micro_batch=1)
    commits = lockstep_commits(steps, at=Position(), first_step=0, last_step=10**6, generation=0)
    assert len(commits) == 1
    ledger = Ledger(samples=3)
    ledger.commit(commits[0])
    assert len(json.dumps(ledger.state())) < 200
    assert ledger.committed_samples == 3 * 10**6


def test_restore_takes_back_what_came_after():
    ledger = Ledger(samples=10)
    ledger.commit(commit(0, 4))
    state = json.loads(json.dumps(ledger.state()))
    ledger.commit(commit(4, 8, first_step=1, last_step=2))
    ledger.restore(state)
    assert (ledger.next_step, ledger.newest) == (1, Position(offset=4))
    ledger.commit(commit(4, 8, first_step=1, last_step=2))
    assert Ledger.from_state(ledger.state()).state() == ledger.state()


def test_restore_refuses_another_data_set():
    with pytest.raises(InternalError, match="counts 10 samples per epoch, the restored one 9"):
        Ledger(samples=10).restore(Ledger(samples=9).state())


def golden_records():
    """A run that is resumed in epoch 2, and whose data grows from epoch 3 on, and once more."""
    steps = Steps(samples=10, global_batch=4, micro_batch=2, drop_last=True)
    ledger, records = Ledger(samples=10), [header_record(10)]

    def grow(epoch, samples):
        nonlocal steps
        steps = steps.grown(epoch, samples)
        ledger.grow(epoch, samples)
        records.append(growth_record(epoch, samples))

    def count(first_step, last_step, generation):
        for c in lockstep_commits(
            steps,
            at=steps.position_after(first_step, Position()),
            first_step=first_step,
            last_step=last_step,
            generation=generation,
        ):
            ledger.commit(c)
            records.append(commit_record(c))

    def skip(step, epoch, start, stop, why):
        skipped = Skip(step=step, epoch=epoch, start=start, stop=stop, why=why)
        ledger.skip(skipped)
        records.append(skip_record(skipped))

    count(0, 5, 0)
    skip(1, 0, 4, 6, ERROR)
    checkpoint = ledger.state()
    count(5, 6, 1)
    skip(5, 2, 4, 8, NAN)
    records += [header_record(10), restore_record(checkpoint)]
    ledger.restore(checkpoint)
    count(5, 6, 2)
    grow(3, 12)
    grow(3, 13)
    count(6, 13, 2)
    checkpoint = ledger.state()
    count(13, 14, 2)
    records += [header_record(10), restore_record(checkpoint)]
    ledger.restore(checkpoint)
    grow(6, 16)
    count(13, 20, 3)
    return ledger, records


def test_the_golden_file_is_written_and_read():
    ledger, records = golden_records()
    text = GOLDEN.read_text()
    assert "".join(ledger_line(r) for r in records) == text
    replayed = read_ledger(text.splitlines(keepends=True))
    assert replayed.state() == ledger.state()
    assert replayed.audit().exact
    assert not replayed.torn
    assert ledger.sizes.later == ((3, 13), (6, 16))
    assert ledger.newest == Position(epoch=7, offset=4)
    assert [str(skip) for skip in ledger.skips] == ["epoch 0 [4, 6), step 1, error"]


@pytest.mark.parametrize(
    ("then", "grown"), [(FORMAT_1, ()), (FORMAT_2, ((3, 13), (6, 16)))], ids=["1", "2"]
)
def test_files_of_older_formats_are_read(then, grown):
    ledger = read_ledger(then.read_text().splitlines())
    assert ledger.audit().exact
    assert (ledger.skips, ledger.sizes.later) == ((), grown)
    assert Ledger.from_state(ledger.state()).state() == ledger.state()
    if then == FORMAT_1:
        assert (ledger.next_step, ledger.newest) == (6, Position(epoch=3))


def test_every_prefix_of_the_file_is_read_and_a_torn_line_reported():
    text = GOLDEN.read_text()
    first = text.index("\n") + 1
    for end in range(first - 1, len(text)):
        ledger = read_ledger(text[:end].splitlines())
        whole = text[:end].endswith("}") and text[end] == "\n"
        assert bool(ledger.torn) == (not whole and not text[:end].endswith("\n")), text[:end][-50:]
        assert ledger.audit().exact


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no header"),
        (['{"form'], "no header"),
        (['{"commit":{}}'], "line 1 .* before its header"),
        (["H", '{"comm', "H"], "line 2 .* no JSON object, and more follows"),
        (["H", '{"commit":{"first_step":0}}'], "line 2"),
        (["H", '{"commit":{"x":1}}'], "no field 'x'"),
        (["H", '{"commit":{"first_step":"0"}}'], "whole numbers"),
        (["H", "[1]"], "line 2 .* not a record"),
        (["H", '{"restore":{"samples":11}}'], "line 2 .* 10 samples per epoch"),
        (["H", '{"restore":{"samples":10}}'], "line 2"),
        (['{"format":4,"kind":"ledger","samples":10}'], "format 4, this version reads up to 3"),
        (['{"grow":{"epoch":1,"samples":11}}'], "line 1 .* before its header"),
        (["H", '{"grow":{"epoch":1}}'], "line 2 .* not a record"),
        (["H", '{"grow":{"epoch":1,"samples":9}}'], "line 2 .* can only grow"),
        (["H", '{"grow":{"epoch":0,"samples":11}}'], "line 2 .* can only grow"),
        (
            ["H", ledger_line(commit_record(commit(0, 1))), '{"grow":{"epoch":0,"samples":11}}'],
            "line 3 .* cannot grow from epoch 0 on: the ledger ends at",
        ),
        (["H", '{"restore":{"samples":10,"later":[[2]]}}'], "line 2"),
        (['{"format":1,"kind":"ledger","samples":0}'], "at least one sample"),
        (["H", ledger_line(commit_record(commit(4, 12)))], "not a range of an epoch of 10"),
    ],
)
def test_damage_is_an_error_that_names_the_line(lines, problem):
    header = ledger_line(header_record(10))
    with pytest.raises(RunDirectoryError, match=problem):
        read_ledger([header if line == "H" else line for line in lines])


def test_a_doubled_record_is_found_by_the_audit():
    records = [header_record(10), commit_record(commit(0, 6)), commit_record(commit(4, 8))]
    audit = read_ledger(ledger_line(r) for r in records).audit()
    assert not audit.exact
    assert [str(r) for r in audit.doubled] == ["epoch 0 [4, 6)"]


def test_what_was_doubled_after_the_restored_step_is_taken_back():
    ledger = Ledger(samples=10)
    ledger.replay(commit(0, 4, last_step=1))
    state = ledger.state()
    ledger.replay(commit(2, 6, first_step=1, last_step=2))
    assert not ledger.audit().exact
    ledger.restore(state)
    assert ledger.audit().exact


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
