"""Where a replica computes, and what happens to batches on the way there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from raycloud.errors import PlacementError, TaskError
from raycloud.step.device import (
    Copies,
    arrived,
    choose,
    concatenate,
    move,
    room_bytes,
)


class Pair(NamedTuple):
    x: Any
    y: Any


def plain(value: Any) -> Any:
    """The value with lists in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("batches", "joined"),
    [
        pytest.param([row(1, 2), row(3, 4)], [[1, 2], [3, 4]], id="tensors"),
        pytest.param([torch.tensor([1]), torch.tensor([2, 3])], [1, 2, 3], id="a short one"),
        pytest.param([(row(1), row(2)), (row(3), row(4))], ([[1], [3]], [[2], [4]]), id="tuples"),
        pytest.param([[row(1)], [row(3)]], [[[1], [3]]], id="lists"),
        pytest.param(
            [Pair(row(1), row(2)), Pair(row(3), row(4))], Pair([[1], [3]], [[2], [4]]), id="named"
        ),
        pytest.param(
            [{"a": row(1), "b": (row(2),)}, {"b": (row(4),), "a": row(3)}],
            {"a": [[1], [3]], "b": ([[2], [4]],)},
            id="mappings, nested",
        ),
        pytest.param([row(1)], [[1]], id="a single one"),
    ],
)
def test_batches_are_joined_along_their_first_dimension(batches: list[Any], joined: Any) -> None:
    made = concatenate(batches, [len(first(batch)) for batch in batches])
    assert plain(made) == joined
    assert type(made) is type(batches[0])


def first(batch: Any) -> torch.Tensor:
    """Its first tensor."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([torch.tensor(1), torch.tensor(2)], id="no dimension"),
        pytest.param([row(1, 2), row(1, 2, 3)], id="another width"),
        pytest.param([row(1), row(1).double()], id="another type"),
        pytest.param([row(1), torch.tensor([1.0])], id="another number of dimensions"),
        pytest.param([torch.tensor([1]), torch.tensor(1)], id="one without a dimension"),
        pytest.param([(row(1), 5), (row(2), 5)], id="a number inside"),
        pytest.param([{"a": row(1), "b": "x"}, {"a": row(1), "b": "x"}], id="text inside"),
        pytest.param([{"a": row(1)}, {"b": row(1)}], id="another key"),
        pytest.param([{"a": row(1)}, {"a": row(1), "b": row(2)}], id="a key more"),
        pytest.param([[row(1)], [row(1), row(2)]], id="a longer list"),
        pytest.param([[row(1)], (row(1),)], id="another kind"),
        pytest.param([row(1), [row(1)]], id="a tensor and a list"),
        pytest.param([None, None], id="nothing"),
    ],
)
def test_what_cannot_be_joined_is_none(batches: list[Any]) -> None:
    assert concatenate(batches, [1] * len(batches)) is None


def test_what_has_no_row_for_each_sample_is_not_joined() -> None:
    """Edges, offsets, or time."""
    batches = [(row(1), row(1, 2, 3)), (row(2), row(4, 5, 6))]
    assert concatenate(batches, [1, 1]) is not None
    assert concatenate(batches, [3, 3]) is None
    assert concatenate([batch[1] for batch in batches], [2, 2]) is None


def test_a_worker_without_gpus_computes_on_the_cpu() -> None:
    assert choose(0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("built_for", "hint"),
    [(None, "a CUDA build of torch"), ("13.0", "start Ray on this node with")],
)
def test_a_gpu_that_torch_does_not_see_is_refused(
    built_for: str | None, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(PlacementError, match="torch sees none") as refused:
        choose(1)
    assert hint in refused.value.hint


class Encoded(UserDict):  # type: ignore[type-arg]
    """Keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Graph:
    """Moves itself, and nobody else knows its tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


@dataclass(frozen=True)
class Pieces:
    x: torch.Tensor
    y: dict[str, torch.Tensor]
    name: str = "n"


CPU = torch.device("cpu")
META = torch.device("meta")


def test_mappings_of_the_users_own_are_joined_as_dicts() -> None:
    made = concatenate([{"in": Encoded(x=row(1))}, {"in": Encoded(x=row(2))}], [1, 1])
    assert plain(made) == {"in": {"x": [[1], [2]]}}
    assert concatenate([Encoded(x=row(1)), Encoded(y=row(2))], [1, 1]) is None
    assert concatenate([Encoded(x=row(1)), Encoded(x=row(2), y=3)], [1, 1]) is None


def test_batches_stay_what_they_are_on_the_cpu() -> None:
    for batch in (Encoded(x=row(1)), {"x": row(1)}, Graph(row(1)), object()):
        assert move(batch, CPU) is batch
        assert arrived(Copies(CPU).send(batch), CPU) is batch


def test_elsewhere_they_keep_their_type() -> None:
    encoded = move(Encoded(x=row(1), n=None, names=["a"]), META)
    assert type(encoded) is Encoded
    assert encoded.x.device == META
    assert (encoded.n, encoded.names) == (None, ["a"])
    ordered = move(OrderedDict(b=row(1), a=row(2)), META)
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]
    frozen = move(MappingProxyType({"x": row(1)}), META)
    assert type(frozen) is MappingProxyType
    assert frozen["x"].device == META
    pieces = move(Pieces(row(1), {"y": row(2)}), META)
    assert type(pieces) is Pieces
    assert (pieces.x.device, pieces.y["y"].device, pieces.name) == (META, META, "n")
    named = arrived(Pair(row(1), (row(2), ["label", None])), META)  # not sent ahead
    assert type(named) is Pair
    assert named.y[0].device == META
    assert named.y[1] == ["label", None]


def test_what_can_move_itself_does() -> None:
    graph = Graph(row(1))
    moved = move({"g": graph, "l": [graph]}, META)
    assert moved["g"].x.device == moved["l"][0].x.device == META
    assert graph.x.device == CPU
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    there = move(packed, META)
    assert there.data.device == META
    assert there.batch_sizes.device == CPU  # as torch wants it


def test_a_mapping_that_cannot_be_copied_is_named() -> None:
    class Strict(UserDict):  # type: ignore[type-arg]
        def __setitem__(self, key: Any, item: Any) -> None:
            if "x" in self.data:
                raise TypeError("it is closed")
            super().__setitem__(key, item)

    with pytest.raises(TaskError, match="a Strict, which cannot be copied to the GPU: TypeError"):
        move(Strict(x=row(1)), META)


MB = 2**20
NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
NONE = 9223372036854771712  # what version 1 says where there is no limit


def tree(root: Path, groups: str, files: Mapping[str, object]) -> Path:
    """A machine with 4,000 MB to be had, and a process in it that takes 100 MB."""
    told = {
        "proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {4000 * 1024} kB\n",
        "proc/self/status": f"Name:\tx\nVmRSS:\t  {100 * 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in told.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def new(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{NEW}{folder}/memory.max": limit,
        f"{NEW}{folder}/memory.current": used,
        f"{NEW}{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


def old(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    return {
        f"{OLD}{folder}/memory.limit_in_bytes": limit,
        f"{OLD}{folder}/memory.usage_in_bytes": used,
        f"{OLD}{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive}",
    }


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/", {}, 4000 * MB),
        ("0::/a", new("/a", "max", 50 * MB), 4000 * MB),
        ("0::/a", new("/a", 1000 * MB, 300 * MB, inactive=100 * MB), 800 * MB),
        ("0::/a/b", new("/a", 500 * MB, 300 * MB) | new("/a/b", "max", 1), 200 * MB),
        ("0::/pod/9", new("", 600 * MB, 200 * MB), 400 * MB),  # told by its name outside
        ("0::/../other", new("", 600 * MB, 200 * MB), 400 * MB),
        ("0::/a", new("/a", 200 * MB, 300 * MB), 0),
        ("9:cpu,cpuacct:/a\n4:memory:/a\n0::/", old("/a", 900 * MB, 100 * MB), 800 * MB),
        ("4:memory:/a", old("/a", NONE, 100 * MB) | old("", NONE, 1), 4000 * MB),
        ("4:memory:/a/b", old("", 700 * MB, 100 * MB, inactive=50 * MB), 650 * MB),
        ("4:cpu:/a\n0::/u", new("/unified/u", 400 * MB, 100 * MB), 300 * MB),
    ],
)
def test_the_narrowest_limit_counts(
    groups: str, files: dict[str, object], left: int, tmp_path: Path
) -> None:
    assert room_bytes(None, tree(tmp_path, groups, files)) == left // 4


def test_what_is_reserved_is_a_limit_too(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", new("/a", 1000 * MB, 300 * MB))
    assert room_bytes(500 * MB, root) == 100 * MB
    assert room_bytes(50 * MB, root) == 0
    assert room_bytes(5000 * MB, root) == 175 * MB


def test_where_nothing_is_told_a_part_of_the_machine_counts(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert room_bytes(None, tmp_path) == whole // 16


def test_this_machine() -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < room_bytes(None) <= whole // 4
    assert room_bytes(1) == 0


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of this machine with a limit of 300 MB, below this process's own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = dict(line.split(":", 2)[1:] for line in lines)
    limit, mount = ("memory.limit_in_bytes", OLD) if "memory" in own else ("memory.max", NEW)
    path = own.get("memory", own.get("", "/"))
    made = Path("/", mount, path.lstrip("/"), f"raycloud-{os.getpid()}")
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    try:
        (made / limit).write_text(f"{1200 * MB}\n")
    except OSError as error:
        pytest.skip(f"no limit can be set: {error}")
    else:
        yield made
    finally:
        made.rmdir()


def test_a_group_of_this_machine(group: Path) -> None:
    program = "from raycloud.step.device import room_bytes; print(room_bytes(None))"
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 200 * MB < int(found.stdout) <= 300 * MB
