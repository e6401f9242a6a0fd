"""What a member claims of its node's cache, where no process of the pipeline is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.data.cache import DataSet
from raycloud.on_ray.pipeline import Ready
from raycloud.on_ray.provider import RayProvider
from raycloud.worker.context import MemberConfig
from tests.lockstep import NetTask, job

RECORD = DataSet(id="0123456789abcdef", task="Net", split="train", source="a", keys=())


def member(node: str) -> RayProvider:
    config = MemberConfig(
        member=1, node=node, address="", job=job(), task=NetTask, checkpoints="", pipeline="p"
    )
    return RayProvider(config, node)


def ready(*nodes: str) -> Ready:
    handles = dict.fromkeys(nodes)
    return Ready(prepared={}, records=(RECORD,), handles=handles, notices=())


def uses(root: Path) -> list[str]:
    return [path.parent.name for path in root.glob("uses/*/*.json")]


def test_a_member_claims_what_it_reads_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCLOUD_CACHE", str(tmp_path))
    one = member("far")
    one._claim(ready("home"))
    one._claim(ready("home"))
    assert uses(tmp_path) == [RECORD.id]
    one.close()
    one.close()
    assert uses(tmp_path) == []
    member("home")._claim(ready("home"))  # the pipeline's process does
    assert uses(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYCLOUD_CACHE", str(tmp_path / "file"))
    one = member("far")
    one._claim(ready("home"))
    [said] = one.notices()
    assert "in use" in said.what
    assert str(tmp_path / "file") in said.detail["why"]
    one.close()
