"""Job files that would fill the memory, make an object, or reach out of their folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycloud.checkpoint import open_store
from raycloud.errors import CheckpointError, RaycloudError, SpecError, TaskError
from raycloud.on_ray.tasks import resolve
from raycloud.spec import load_job
from tests.hostile_forks import Case

_PLAIN = "format: 1\ntask: os:system\nsteps: 10\nglobal_batch: 8\nmicro_batch: 4\n"
_LAUGHS = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9))


class Payload:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch ../outside/executed",)


def _wrote(text: str | bytes) -> Callable[[Path], None]:
    content = text.encode() if isinstance(text, str) else text

    def make(folder: Path) -> None:
        (folder / "job.yaml").write_bytes(content)

    return make


def _load(folder: Path) -> None:
    load_job(folder / "job.yaml")


def _case(
    text: str | bytes,
    says: str,
    error: type[RaycloudError] = SpecError,
    act: Callable[[Path], Any] = _load,
) -> Case:
    return Case(make=_wrote(text), open=act, error=error, says=says)


def _with(line: str, says: str) -> Case:
    name = line.partition(":")[0]
    kept = [old for old in _PLAIN.splitlines() if old.partition(":")[0] != name]
    return _case("\n".join([*kept, line]) + "\n", says)


def _resolve(folder: Path) -> None:
    resolve(load_job(folder / "job.yaml"))


def _open_store(folder: Path) -> None:
    store = open_store(str(load_job(folder / "job.yaml").checkpoint.path))
    store.write("step-00000001/manifest.json", [b"{}"])


def _override(folder: Path) -> None:
    load_job(folder / "job.yaml", ["name=!!python/object/apply:os.system ['touch executed']"])


CASES = {
    "a billion laughs": _case(f"a0: &a0 [lol]\n{_LAUGHS}{_PLAIN}", "anchor"),
    "merge keys": _case(f"{_PLAIN}data: &a {{shuffle: true}}\nelastic: {{<<: *a}}\n", "anchor"),
    "an object by its tag": _case(
        "task: !!python/object/apply:os.system ['touch ../outside/executed']\n", "tag"
    ),
    "a function by its tag": _case("task: !!python/name:os.system ''\n", "tag"),
    "a tag of its own": _case(
        f"%TAG ! tag:yaml.org,2002:python/\n---\n{_PLAIN}a: !tuple []\n", "tag"
    ),
    "ever deeper lists": _case(f"a: {'[' * 100_000}\n", "deeper"),
    "ever deeper sections": _case("\n".join(" " * n + "a:" for n in range(600)), "deeper"),
    "thirty thousand names": _case("".join(f"{n:x}: 1\n" for n in range(30_000)), "values"),
    "a file of 64 MB": _case(b"#" * 64 * 2**20, "larger"),
    "a number of 250,000 digits": _with(f"steps: {'9' * 250_000}", "steps"),
    "a hexadecimal number without end": _with(f"steps: 0x{'f' * 250_000}", "steps"),
    "a pickle": _case(pickle.dumps(Payload()), "UTF-8"),
    "a pickle of protocol 0": _case(pickle.dumps(Payload(), protocol=0), "job file"),
    "a name that is a path": _with("name: ../../outside/run", "name"),
    "an absolute name": _with("name: /tmp/run", "name"),
    "a name with a line end": _with('name: "a\\nb"', "name"),
    "a name with a terminal's escape": _with('name: "a\\x1b]0;owned\\x07"', "name"),
    "a name of 100,000 letters": _with(f"name: {'a' * 100_000}", "name"),
    "data at a path with a zero byte": _with('data: {path: "a\\0/../../outside"}', "data.path"),
    "data at a path with a line end": _with('data: {path: "a\\nb"}', "data.path"),
    "checkpoints at a path with a zero byte": _with('checkpoint: {path: "a\\0b"}', "checkpoint"),
    "checkpoints through a chain": _case(
        f"{_PLAIN}checkpoint: {{path: 'simplecache::file:///outside'}}\n",
        "checkpoint.path",
        CheckpointError,
        _open_store,
    ),
    "checkpoints by a protocol that runs code": _case(
        f"{_PLAIN}checkpoint: {{path: 'reference://../outside'}}\n",
        "checkpoint.path",
        CheckpointError,
        _open_store,
    ),
    "a task that is an expression": _with("task: \"__import__('os').system('id'):A\"", "task"),
    "a task that is a path alone": _with("task: ../../../../etc/passwd:A", "task"),
    "a task with a zero byte": _with('task: "a\\0.py:A"', "task"),
    "a task that is a device": _with("task: ../../../../../../../dev/zero/x.py:A", "task"),
    "a task that is a function": _case(_PLAIN, "no raycloud.Task", TaskError, _resolve),
    "an override with a tag": Case(
        make=_wrote(_PLAIN), open=_override, error=SpecError, says="tag"
    ),
}
