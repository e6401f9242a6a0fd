"""A run's data, seen from the driver: which files it knows, and which are added."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raycloud.bounded import json_value, read_whole
from raycloud.data.block import publish, write_all
from raycloud.data.index import Input
from raycloud.errors import MachineError, RaycloudError, RunDirectoryError
from raycloud.events import DataPrepared, Noticed
from raycloud.on_ray.attach import node_id_here
from raycloud.on_ray.ingest import PipelineConfig, living_pipeline
from raycloud.on_ray.pool import Opaque
from raycloud.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.events import Event
    from raycloud.on_ray.pool import ActorPool
    from raycloud.on_ray.session import Session
    from raycloud.spec import Job

FORMAT = 1

_LARGEST_BYTES = 2**30  # there is an entry for each file that a run reads
_MOST_VALUES = 2**26
REFRESH_S = 10.0  # between two looks for files that were added

# What decides, beside the files, which row is which sample.
_LAYOUT = ("partition_by", "partition_bytes", "stratify", "window", "bad_rows")


def pipeline_name() -> str:
    """A name that no other run's pipeline has."""
    return f"raycloud-data-{secrets.token_hex(8)}"


class RunInputs:
    """What the driver knows of the run's `Source`s. Asks the pipeline from time to time.

    Args:
        session: The start of the run.
        pool: Makes the pipeline, and ends it.

    Attributes:
        pipeline: What it is called.
        known: The inputs of the training samples, in their order.
    """

    def __init__(self, session: Session, pool: ActorPool) -> None:
        """Read what the run knew, if it goes on.

        Raises:
            RunDirectoryError: `data.json` is damaged.
        """
        self.pipeline = pipeline_name()
        self._pool = pool
        self._file = session.directory.path / "data.json"
        self._job = session.job
        self._task, self._code = session.task, session.code
        self._clock = session.clock
        self._look_s = float("inf")
        self._looking: Any = None
        self._told: set[str] = set()
        self.known = read_known(self._file) if session.resume else ()

    def begin(self) -> None:
        """Start the pipeline before members are there to ask, if the task looks as if they will.

        What it cannot do, it says to them.
        """
        if self._task.preprocess is not Task.preprocess:  # which is for the rows of a `Source`
            job, code = self._code.named_in(self._job), self._code
            config = PipelineConfig(job=job, task=code, known=self.known)
            made = self._pool.start_pipeline(self.pipeline, Opaque(ray.put(config)), node_id_here())
            made.call.remote("begin")

    def adopt(self, pipeline: str) -> None:
        """Go on with a pipeline that is there."""
        self.pipeline = pipeline
        if self._job.data.refresh:
            self._look_s = self._clock.monotonic_s() + REFRESH_S

    def config_fields(self) -> dict[str, Any]:
        """What members are told, as fields of `MemberConfig`."""
        return {"pipeline": self.pipeline, "known": self.known, "home": node_id_here()}

    def keep(self, event: Event) -> None:
        """Keep which inputs the training samples come from, before a checkpoint counts on them."""
        if not isinstance(event, DataPrepared) or event.split != "train":
            return
        inputs = tuple(Input(**record) for record in event.inputs)
        if len(inputs) > len(self.known) or not self._file.exists():
            self.known = inputs
            write_known(self._file, self._job, inputs)
        if self._job.data.refresh and self._look_s == float("inf"):
            self._look_s = self._clock.monotonic_s() + REFRESH_S

    def poll(self) -> list[Event]:
        """What the last look has found. Returns at once."""
        if self._looking is None:
            if self._clock.monotonic_s() < self._look_s:
                return []
            self._look_s = self._clock.monotonic_s() + REFRESH_S
            try:
                self._looking = living_pipeline(self.pipeline).call.remote("refresh")
            except ValueError:  # whoever needs a block makes it again
                return self._once("the data's pipeline is gone", "resume the run to take them up")
        if not ray.wait([self._looking], timeout=0)[0]:
            return []
        looking, self._looking = self._looking, None
        try:
            found = ray.get(looking)
        except RayError as error:
            return self._once(f"the data's pipeline did not answer: {type(error).__name__}", "")
        if isinstance(found, RaycloudError):
            return self._once(found.message, found.hint)
        told: list[Event] = [Noticed(what=what, detail=dict(d)) for what, d in found.notices]
        return [*told, found.grown] if found.grown is not None else told

    def _once(self, why: str, hint: str) -> list[Event]:
        if why in self._told:
            return []
        self._told.add(why)
        detail = {"why": why, "hint": hint}
        return [Noticed(what="files that were added are not taken up", detail=detail)]


def read_known(file: Path) -> tuple[Input, ...]:
    """The inputs of a run, in their order; none where it has read none.

    Raises:
        RunDirectoryError: The file is damaged, or of another version.
    """
    try:
        record = json_value(read_whole(file, _LARGEST_BYTES), _MOST_VALUES)
        inputs = tuple(Input(**one) for one in record["inputs"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}",
            hint="restore it, or start a new run: it says which files the samples came from",
        ) from error
    if record["format"] != FORMAT:
        raise RunDirectoryError(
            f"{file} is of format {record['format']!r}, not {FORMAT}",
            hint="go on with the version of raycloud that wrote it",
        )
    return inputs


def write_known(file: Path, job: Job, inputs: tuple[Input, ...]) -> None:
    """Keep the inputs of a run, all of them or what was there.

    Raises:
        MachineError: They cannot be written.
    """
    data = job.data.model_dump(mode="json")
    record = {
        "format": FORMAT,
        "layout": {
            "global_batch": job.global_batch,
            "micro_batch": job.micro_batch,
            **{name: data[name] for name in _LAYOUT},
        },
        "versions": max((one.version for one in inputs), default=0) + 1,
        "inputs": [asdict(one) for one in inputs],
    }
    text = json.dumps(record, indent=1).encode()
    try:
        publish(file, lambda draft: write_all(draft, text))
    except OSError as error:
        raise MachineError(
            f"{file} cannot be written: {error.strerror}",
            hint="free space there, or give another --run-dir",
        ) from error
