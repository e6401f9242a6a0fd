"""What workers note while they race, and what is read from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import journal, workload
from benchmarks.journal import Journal
from benchmarks.machine import ROOT

pytestmark = pytest.mark.unit


def keep(worker: Journal, update: int, weight: float) -> None:
    """Keep parameters that all have one value."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, weight)
    worker.snapshot(model, update)


def kept(directory: Path) -> dict[int, float]:
    """Those values, by update."""
    found = {
        u: journal.load_snapshot(p, ["weight", "bias"]) for u, p in journal.snapshots(directory)
    }
    return {update: float(parameters["weight"][0, 0]) for update, parameters in found.items()}


def test_what_was_noted_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(journal.NODE, "n1")
    written = Journal(tmp_path)
    for update in (1, 2, 3):
        written.note(update=update, samples=64)
    (worker,) = journal.read(tmp_path)
    assert worker.node == "n1"
    assert [(note.update, note.samples) for note in worker.notes] == [(1, 64), (2, 64), (3, 64)]
    times = [worker.started_s, *(note.t_s for note in worker.notes)]
    assert times == sorted(times)


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path).note(update=1, samples=64)
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'{"t_s": 12.5, "upd')
    (worker,) = journal.read(tmp_path)
    assert len(worker.notes) == 1


def test_a_process_that_had_no_time_to_write_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "n1-7.jsonl").write_bytes(b"")
    assert journal.read(tmp_path) == ()


def test_another_format_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "n1-7.jsonl").write_text('{"format": 9}\n')
    with pytest.raises(ValueError, match=r"n1-7\.jsonl: format 9"):
        journal.read(tmp_path)


def test_the_first_worker_keeps_the_parameters_and_the_second_finds_them(tmp_path: Path) -> None:
    workers = [Journal(tmp_path / "journals", snapshots=tmp_path) for _ in range(2)]
    for weight, worker in enumerate(workers, 1):
        keep(worker, 4, weight)
        keep(worker, 5, weight)
    assert kept(tmp_path) == {5: 1.0}
    ((_, path),) = journal.snapshots(tmp_path)
    with pytest.raises(ValueError, match="weight"):
        journal.load_snapshot(path, ["other"])


def test_a_process_that_began_later_replaces_what_was_lost(tmp_path: Path) -> None:
    lost = [Journal(tmp_path / "journals", snapshots=tmp_path) for _ in range(2)]
    keep(lost[0], 5, 1.0)
    keep(lost[0], 10, 1.0)
    restarted = [Journal(tmp_path / "journals", snapshots=tmp_path) for _ in range(2)]
    keep(lost[1], 5, 2.0)
    assert kept(tmp_path) == {5: 1.0, 10: 1.0}, "one that was late changes nothing"
    keep(restarted[0], 5, 3.0)
    keep(restarted[1], 5, 4.0)
    assert kept(tmp_path) == {5: 3.0, 10: 1.0}
    keep(Journal(tmp_path / "journals", snapshots=tmp_path), 5, 5.0)
    assert kept(tmp_path) == {5: 5.0, 10: 1.0}


def test_a_process_that_goes_back_replaces_what_was_lost(tmp_path: Path) -> None:
    survivor, other = (Journal(tmp_path / "journals", snapshots=tmp_path) for _ in range(2))
    for update in range(1, 8):
        survivor.note(update=update, samples=64)
        keep(survivor, update, 1.0)
    for update in range(4, 6):
        survivor.note(update=update, samples=64)
    keep(survivor, 5, 2.0)
    keep(other, 5, 3.0)
    assert kept(tmp_path) == {5: 2.0}


def test_a_writer_that_was_killed_blocks_nobody_who_comes_later(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from torch import nn\n"
        "from benchmarks import journal\n"
        "def die(parameters, path):\n"
        "    path.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "place = Path(sys.argv[1])\n"
        "notes = journal.Journal(place / 'journals', snapshots=place)\n"
        "journal.save_file = die\n"
        "notes.snapshot(nn.Linear(2, 1), 5)\n"
    )
    beside = Journal(tmp_path / "journals", snapshots=tmp_path)
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.glob("*.draft")] == [".draft"]
    keep(beside, 5, 1.0)
    assert kept(tmp_path) == {}
    keep(Journal(tmp_path / "journals", snapshots=tmp_path), 5, 2.0)
    assert kept(tmp_path) == {5: 2.0}


def test_what_was_lost_is_not_read_though_nothing_has_replaced_it_yet(tmp_path: Path) -> None:
    keep(Journal(tmp_path / "journals", snapshots=tmp_path), 5, 1.0)
    (tmp_path / "000005-1.claim").symlink_to("1.5")  # its writer has only begun
    assert kept(tmp_path) == {}


def test_importing_it_takes_no_model(tmp_path: Path) -> None:
    code = "import benchmarks.journal, sys; print('benchmarks.workload' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"


def test_a_stream_is_the_canonical_sequence_however_it_is_cut() -> None:
    text = workload.load_text()[: 128 * 10 + 1]
    stream = workload.Stream(text)
    whole = stream.batch(0, 25)  # two and a half epochs
    parts = [stream.batch(start, count) for start, count in ((0, 7), (7, 6), (13, 12))]
    assert torch.equal(whole, torch.cat(parts))
    first, second = ({tuple(row) for row in whole[a:b].tolist()} for a, b in ((0, 10), (10, 20)))
    assert first == second
    assert len(first) == 10


def test_a_stream_begins_as_the_batches_of_two_workers_do() -> None:
    text = workload.load_text()
    batches = [workload.Batches(text, rank=rank, steps=2) for rank in range(workload.WORKERS)]
    both = torch.cat([batches[0][1], batches[1][1]])
    assert torch.equal(workload.Stream(text).batch(workload.GLOBAL_BATCH, 32), both)
