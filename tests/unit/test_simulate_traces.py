"""Traces of machines held and of batch times: read, or refused with line, column and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.simulate.traces import Held, Paced, read_trace

HEAD = "worker,time,batch_time_norm\n"


def read(tmp_path: Path, name: str, text: str) -> Held | Paced:
    """The trace of a file with this text."""
    (tmp_path / name).write_text(text)
    return read_trace(tmp_path / name)


def test_machines_held_go_on_from_the_beginning(tmp_path: Path) -> None:
    held = read(tmp_path, "spot.json", '{"metadata": {"gap_seconds": 60}, "data": [2, 1, 2]}')
    assert held == Held(name="spot.json", gap_s=60.0, counts=(2, 1, 2))
    assert isinstance(held, Held)
    once = held.faults(nodes=2, until_s=600.0)
    assert [(one.at_s, one.many) for one in once] == [(60.0, 1), (120.0, 2)]
    again = held.faults(nodes=2, until_s=400.0, again=True)
    assert [one.at_s for one in again] == [60.0, 120.0, 240.0, 300.0]


def test_batch_times_are_told_of_moments_that_all_workers_have(tmp_path: Path) -> None:
    text = f"{HEAD}0,1,50\n1,1,300\n0,2,70\n1,2,100\n0,3,60\n"
    paced = read(tmp_path, "job.csv", text)
    assert isinstance(paced, Paced)
    assert paced.rows == ((50.0, 300.0), (70.0, 100.0))
    assert paced.workers == 2
    assert paced.slow()[0] == (50 / 85, 300 / 85)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.txt", "", "is no trace: its name ends neither in .json nor in .csv"),
        ("t.json", "[", "is no JSON"),
        ("t.json", "[]", "t.json: metadata.gap_seconds = None: is no trace"),
        ("t.json", '{"metadata": {"gap_seconds": 0}}', "t.json: metadata.gap_seconds = 0: is no"),
        ("t.json", '{"metadata": {"gap_seconds": 9}, "data": []}', "t.json: data = []: is no"),
        (
            "t.json",
            '{"metadata": {"gap_seconds": 9}, "data": [1, -1]}',
            "t.json: data[1] = -1: is no number of machines",
        ),
        (
            "t.json",
            '{"metadata": {"gap_seconds": 9}, "data": [0, 0]}',
            "t.json: data = 0: no machine was ever there",
        ),
        ("t.csv", "worker,time\n0,1\n", "t.csv, line 1 = 'worker,time': is not the names of"),
        ("t.csv", f"{HEAD}a,1,5\n", "t.csv, line 2: worker = 'a': is no whole number"),
        ("t.csv", f"{HEAD}0,1,5\n1,1,0\n", "t.csv, line 3: batch_time_norm = '0': is no time"),
        ("t.csv", f"{HEAD}0,1,nan\n", "t.csv, line 2: batch_time_norm = 'nan': is no time above"),
        ("t.csv", f"{HEAD}0,1\n", "t.csv, line 2: batch_time_norm = None: is no time above 0"),
        ("t.csv", HEAD, "a worker needs batch times > 0"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, name, text)
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
