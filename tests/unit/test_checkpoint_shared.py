"""Whether several machines see one place for checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.checkpoint import marked, open_store, see, steps
from raycloud.errors import SpecError


def test_the_same_place_is_seen(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with marked(store) as mark:
        see(open_store(tmp_path), mark, "b")
        assert steps(store) == []
    assert store.names() == []


def test_another_place_is_named_with_its_node_and_a_remedy(tmp_path: Path) -> None:
    there = open_store(tmp_path / "there")
    with marked(open_store(tmp_path / "here")) as mark, pytest.raises(SpecError) as refused:
        see(there, mark, "b")
    assert refused.value.field == "checkpoint.path"
    assert "is another place on node b" in str(refused.value)
    assert "s3://BUCKET/NAME" in str(refused.value.hint)
    assert there.names() == []


def test_what_a_killed_driver_left_is_taken_away(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write("mark-00", [b""])
    store.write("step-00000001/manifest.json", [b"{}"])
    with marked(store) as mark:
        assert store.names("mark-") == [mark]
    assert store.names() == ["step-00000001/manifest.json"]
