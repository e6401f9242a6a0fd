"""From which checkpoint a run goes on that has lost all its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.errors import CheckpointError, MachineError
from raycloud.events import RolledBack
from raycloud.on_ray.checkpoints import found_back
from raycloud.on_ray.cluster import write_known
from raycloud.spec import Job
from tests.checkpoints import damage, memory_store, save


def test_without_a_checkpoint_it_begins_at_the_beginning() -> None:
    assert found_back(memory_store(), None) == (RolledBack(step=0), [])


def test_the_newest_sound_one_with_its_ledger() -> None:
    store = memory_store()
    save(store, 10)
    manifest = save(store, 20)
    assert found_back(store, None) == (RolledBack(step=20, ledger=manifest.ledger), [])


def test_a_damaged_one_is_passed_over_and_told() -> None:
    store = memory_store()
    older, newer = save(store, 10), save(store, 20)
    damage(store, newer.parts[1].file)
    back, [told] = found_back(store, older)
    assert back == RolledBack(step=10, ledger=older.ledger)
    assert told.what == "the checkpoint of step 20 is damaged and was passed over"
    assert "digest differs" in told.detail["why"]


def test_where_all_are_damaged_it_does_not_begin_again() -> None:
    store = memory_store()
    for step in (10, 20):
        damage(store, save(store, step).parts[1].file)
    with pytest.raises(CheckpointError) as caught:
        found_back(store, None)
    for named in ("that of step 20: ", "that of step 10: ", "digest differs", store.place):
        assert named in caught.value.message
    assert "--resume allow" in (caught.value.hint or "")


def test_where_one_was_published_and_none_is_found_it_does_not_begin_again() -> None:
    with pytest.raises(CheckpointError, match="that of step 20: it is not there any more"):
        found_back(memory_store(), None, published=20)


def test_one_before_this_start_is_left_to_another_start() -> None:
    store = memory_store()
    save(store, 10)
    origin = save(store, 20)
    damage(store, origin.parts[0].file)
    with pytest.raises(CheckpointError, match="no checkpoint from step 20 on is sound") as caught:
        found_back(store, origin)
    assert "--resume" in (caught.value.hint or "")


def test_inputs_that_cannot_be_written_down_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    file = tmp_path / "taken" / "data.json"
    with pytest.raises(MachineError, match=r"data\.json cannot be written: ") as told:
        write_known(file, Job(task="noise:Noise", steps=1), ())
    assert "--run-dir" in told.value.hint
