"""The job as a value: defaults, what it derives, and what it refuses when built in Python."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raycloud.errors import SpecError
from raycloud.spec import ElasticSection, Job, SpecErrors, SyncPoint, SyncSection, TaskReference


class Gpt:
    """Stands for a task."""

    class Small:
        """A task within a class."""


def job(**values: Any) -> Job:
    return Job(**{"task": "gpt:Gpt", "steps": 10, **values})


def test_defaults() -> None:
    assert job().model_dump() == {
        "format": 1,
        "name": "run",
        "task": "gpt:Gpt",
        "settings": {},
        "steps": 10,
        "epochs": None,
        "seed": 0,
        "global_batch": 32,
        "base_batch": None,
        "rate_scaling": "none",
        "micro_batch": 4,
        "drop_last": False,
        "fuse": "auto",
        "precision": "fp32",
        "compile": False,
        "clip_norm": None,
        "data": {
            "path": None,
            "shuffle": True,
            "prefetch_steps": 2,
            "partition_by": "rows",
            "partition_bytes": 16 * 2**20,
            "stratify": None,
            "window": 8,
            "bad_rows": "refuse",
            "cpus": "auto",
            "threads": 1,
            "collators": 0,
            "refresh": False,
            "cache": {
                "path": None,
                "memory_bytes": "auto",
                "disk_bytes": None,
                "price_per_gb_month": None,
            },
            "prices": None,
        },
        "elastic": {
            "min_workers": 1,
            "max_workers": 2,
            "shares": "auto",
            "orphan_s": 120,
            "backup_micro_batches": 0,
            "autoscale": False,
        },
        "sync": {
            "period": 1,
            "outer": "auto",
            "stream": 1,
            "warm_steps": "auto",
            "tour": None,
            "topology": "auto",
            "staleness": 0,
            "codec": "none",
            "ratio": None,
            "bucket_bytes": "auto",
        },
        "checkpoint": {
            "path": None,
            "every_steps": "auto",
            "keep": 2,
            "prices": None,
            "most_failed": 10,
        },
        "servers": {"shards": 0, "copies": 0},
        "errors": {
            "on_error": "stop",
            "on_nan": "stop",
            "most_skipped": 10,
            "most_nan_in_a_row": 3,
        },
        "evaluate": {"every_steps": None, "max_samples": None, "batch": 32},
        "resources": {
            "worker": {"cpus": 1, "gpus": 0, "memory_bytes": None, "labels": {}},
            "server": None,
        },
        "tracking": {
            "mlflow": {"uri": None, "experiment": None},
            "wandb": {"mode": "off", "project": None, "entity": None},
        },
    }


def test_micro_batches_of_a_full_step() -> None:
    assert job(global_batch=30, micro_batch=5).micro_batches == 6


@pytest.mark.parametrize(
    "sync",
    [
        "exact",
        {},
        {"topology": "ring"},
        {"period": 1, "topology": "auto", "staleness": 0, "codec": "none"},
        SyncSection(period=1),
    ],
)
def test_sync_point_decides_every_auto(sync: object) -> None:
    point = job(sync=sync).sync_point
    assert point == SyncPoint(period=1, topology="ring", staleness=0, codec="none")


@pytest.mark.parametrize(
    ("gpus", "topology", "expected"),
    [(0, "auto", ("int4", "tree")), (1, "auto", ("none", "ring")), (0, "ring", ("none", "ring"))],
)
def test_auto_takes_int4_where_it_pays(gpus: int, topology: str, expected: tuple[str, str]) -> None:
    sync = {"period": "auto", "topology": topology, "staleness": "auto", "codec": "auto"}
    point = job(sync=sync, resources={"worker": {"gpus": gpus}}).sync_point
    assert (point.codec, point.topology) == expected


@pytest.mark.parametrize(("topology", "taken"), [("auto", "tree"), ("direct", "direct")])
def test_a_codec_goes_by_no_ring(topology: str, taken: str) -> None:
    point = job(sync={"codec": "int4", "topology": topology}).sync_point
    assert point == SyncPoint(period=1, topology=taken, staleness=0, codec="int4")


@pytest.mark.parametrize(("ratio", "taken"), [(None, 4), (128, 128)])
def test_top_k_has_a_ratio(ratio: int | None, taken: int) -> None:
    asked = job(sync={"codec": "topk", "period": 16, "ratio": ratio})
    assert asked.sync_point == SyncPoint(period=16, topology="tree", codec="topk", ratio=taken)
    assert job(sync={"codec": "int4"}).sync_point.ratio is None


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_tree_is_with_a_codec_or_without(codec: str) -> None:
    point = job(sync={"codec": codec, "topology": "tree"}).sync_point
    assert point == SyncPoint(topology="tree", codec=codec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sync": {"codec": "int4", "topology": "ring"}},
            "sync.topology = 'ring': in a ring each member would encode anew",
        ),
        (
            {"sync": {"codec": "topk", "topology": "ring", "period": 8}},
            "sync.topology = 'ring': in a ring each member would encode anew",
        ),
    ],
)
def test_senseless_exchanges_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        job(**changes)


def test_a_job_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        job().steps = 3


def test_a_job_survives_pickling() -> None:
    asked = job(task=Gpt, elastic={"min_workers": 2, "shares": (5, 3)})
    assert pickle.loads(pickle.dumps(asked)) == asked


@pytest.mark.parametrize(
    ("elastic", "most"),
    [
        ({"max_workers": 3}, 3),
        ({"max_workers": 99}, 8),
        ({"max_workers": "auto"}, 8),
        ({"max_workers": "auto", "min_workers": 2, "shares": (5, 3)}, 2),
    ],
    ids=["asked", "no more than there is to do", "auto", "as many as there are shares"],
)
def test_most_workers(elastic: dict[str, Any], most: int) -> None:
    assert job(global_batch=8, micro_batch=1, elastic=elastic).most_workers == most


def test_shares_may_be_zero_for_a_worker() -> None:
    assert job(elastic={"min_workers": 2, "shares": [8, 0]}).elastic.shares == (8, 0)


@pytest.mark.parametrize("labels", [{"zone": "eu-1"}, {"ray.io/market-type": "!in(spot, x)"}])
def test_labels_that_select_nodes(labels: dict[str, str]) -> None:
    assert job(resources={"worker": {"labels": labels}}).resources.worker.labels == labels


def test_settings_are_copied_and_plain() -> None:
    layers = [1, 2]
    asked = job(settings={"layers": layers, "shape": (3, 4), "inner": {"x": None}})
    layers.append(3)
    assert asked.settings == {"layers": [1, 2], "shape": [3, 4], "inner": {"x": None}}


def test_resolved_names_a_class() -> None:
    assert job(task=Gpt).resolved().task == f"{__name__}:Gpt"
    assert job(task=Gpt.Small).resolved().task == f"{__name__}:Gpt.Small"


def test_resolved_names_a_class_within_a_function() -> None:
    class Local:
        """A task defined in passing."""

    name = job(task=Local).resolved().task
    assert name.endswith(".<locals>.Local")
    assert job(task=name).task == name


def test_resolved_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = job(
        task="models/../gpt.py:Gpt", data={"path": "text"}, checkpoint={"path": "s3://bucket/x"}
    ).resolved()
    assert asked.task == f"{tmp_path}/gpt.py:Gpt"
    assert asked.data.path == f"{tmp_path}/text"
    assert asked.checkpoint.path == "s3://bucket/x"
    assert asked.resolved() == asked


@pytest.mark.parametrize("path", ["s3://b/x", "simplecache::s3://b/x", "memory://x"])
def test_resolved_leaves_urls(path: str) -> None:
    assert job(data={"path": path}).resolved().data.path == path


def deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (
            lambda: job(step=3),
            "step = 3: no such field",
            "did you mean `steps`?",
        ),
        (
            lambda: Job(task=Gpt(), steps=10),
            "task = a Gpt: must be a class, or text that names one",
            "give the class, or write its place as in gpt.py:Gpt; its arguments go in settings",
        ),
        (
            lambda: job(settings={"model": {"layer": Gpt()}}),
            "settings.model.layer = a Gpt: a job file cannot hold a value of type Gpt",
            "give text, a number, true, false, null, a list or names with values",
        ),
        (
            lambda: job(settings={"model": {1: 2}}),
            "settings.model = {1: 2}: has the name 1",
            "a name is text",
        ),
        (
            lambda: job(settings={1: 2}),
            "settings = 1: stands there as a name, but is not text",
            "put it in quotes",
        ),
        (
            lambda: job(settings={"\ud800": 2}),
            r"settings = {'\ud800': 2}: has the name '\ud800'",
            "a name is text",
        ),
        (
            lambda: job(settings={"a": "\ud800"}),
            r"settings.a = '\ud800': is not Unicode text",
            "write bytes in hexadecimal",
        ),
        (
            lambda: job(settings={"a": 10**5000}),
            "settings.a = '…': is too large for a job file",
            "write it as text",
        ),
        (
            lambda: job(settings={"a": deep(100)}),
            "settings.a = Ellipsis: goes deeper than 32 levels",
            "flatten it",
        ),
        (
            lambda: job(data={"path": "a\udcff"}),
            r"data.path = 'a\udcff': holds a character that a path cannot",
            "write one path or URL",
        ),
        (
            lambda: job(data={1: 2}),
            "data = 1: stands there as a name, but is not text",
            "put it in quotes",
        ),
        (
            lambda: job(elastic=ElasticSection(min_workers=3)),
            "elastic.min_workers = 3: is more than elastic.max_workers = 2",
            "write min_workers 2 or less, or max_workers 3 or more",
        ),
        (
            lambda: ElasticSection(min_workers=0),
            "min_workers = 0: must be an integer of at least 1",
            "Fewest workers the run begins and computes with; left out, it is 1",
        ),
        (
            lambda: SyncSection(period=0),
            "period = 0: must be auto or an integer of at least 1",
            "Steps between two exchanges, a round; left out, it is 1",
        ),
        (
            lambda: job(sync={"period": 8}, errors={"on_nan": "skip"}),
            "sync.period = 8: a step of a round cannot be undone alone, as errors.on_nan = skip "
            "has it",
            "write period 1, or errors.on_nan stop",
        ),
        (
            lambda: job(sync={"period": 8}, elastic={"backup_micro_batches": 2}),
            "sync.period = 8: in a round workers have unlike weights, so none can compute for "
            "another, as elastic.backup_micro_batches = 2 has it",
            "write period 1, or elastic.backup_micro_batches 0",
        ),
        (
            lambda: job(sync={"period": 8}, evaluate={"every_steps": 5}),
            "sync.period = 8: no round would be longer than 5: something reads the state then",
            "write period 5 or less, or have it read after 8 steps or more",
        ),
        (
            lambda: Job.model_validate(7),
            "job = 7: must be a section",
            None,
        ),
        (
            lambda: Job.model_validate_json('{"task": "a:B"}'),
            "steps = (not set): a job says how long it runs",
            "write `steps: 1000` or `epochs: 1`",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_mistake_in_python(
    build: Callable[[], object], message: str, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpt, "__repr__", lambda _: "a Gpt")
    with pytest.raises(SpecError) as caught:
        build()
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


def test_several_mistakes_survive_pickling() -> None:
    with pytest.raises(SpecErrors) as caught:
        job(steps=0, seed=-1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SpecErrors
    assert str(copy) == str(caught.value)
    assert [other.field for other in copy.all[1:]] == ["seed"]


@pytest.mark.parametrize(
    ("text", "file", "portable"),
    [
        ("gpt.py:Gpt", Path("gpt.py"), "gpt.py:Gpt"),
        ("a:b/gpt.py:Gpt.Small", Path("a:b/gpt.py"), "gpt.py:Gpt.Small"),
        ("package.module:Gpt", None, "package.module:Gpt"),
    ],
)
def test_task_reference(text: str, file: Path | None, portable: str) -> None:
    reference = TaskReference.parse(text)
    assert str(reference) == text
    assert reference.file == file
    assert reference.portable == portable


def test_import_is_light() -> None:
    code = "import sys, raycloud.spec; print({'ray', 'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"set()"


def test_messages_are_as_large_as_asked_or_fit_the_gradient() -> None:
    assert job(sync={"bucket_bytes": 4096}).bucket_bytes(2**30) == 4096
    assert [job().bucket_bytes(2**power) >> 20 for power in (20, 24, 30)] == [1, 2, 4]
    on_gpu = job(resources={"worker": {"gpus": 1}})
    assert [on_gpu.bucket_bytes(2**power) >> 20 for power in (20, 24, 30)] == [1, 2, 25]
