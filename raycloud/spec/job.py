"""What is asked: `Job` and its sections, frozen and checked once."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from raycloud.bounded import expanded
from raycloud.events import SyncPoint
from raycloud.spec.mistakes import Where, combined, mistakes_in
from raycloud.spec.rules import broken
from raycloud.spec.sections import (
    POINT_FIELDS,
    STREAMED_PERIODS,
    Auto,
    CheckpointSection,
    DataSection,
    ElasticSection,
    ErrorsSection,
    EvaluateSection,
    ResourcesSection,
    Section,
    ServersSection,
    SyncSection,
    TrackingSection,
    parse_point,
    plain_settings,
    written_out,
    wrong,
)
from raycloud.spec.sizes import bucket_bytes
from raycloud.spec.yaml_text import is_unicode

FORMAT = 1
EXAMPLE = "gpt.py:Gpt"

_WARM_STEPS, _WARM_PART, _MOST_WARM = 200, 7, 500  # before the first round
_STALENESS = 2
_RATIO = 4
_MEETING_STEPS, _MEETING_PERIODS = 16, 2  # at least, that workers go without meeting
_MOST_PERIOD = 16  # by the grid of benchmarks.sync_grid, longer rounds cost too much of the loss
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLASS = re.compile(r"[^\W\d]\w*(\.([^\W\d]\w*|<locals>))*")


@dataclass(frozen=True, slots=True)
class TaskReference:
    """Where the class of a task is found.

    Attributes:
        place: A Python file (ends in `.py`) or a dotted module.
        qualname: The class in it; dots for a class within a class.
    """

    place: str
    qualname: str

    @property
    def file(self) -> Path | None:
        """The file, if the reference names one; `None` for a module."""
        return Path(self.place) if self.place.endswith(".py") else None

    @property
    def portable(self) -> str:
        """The reference without the folders of its file: what stays when a project is moved."""
        file = self.file
        return str(self) if file is None else f"{file.name}:{self.qualname}"

    def __str__(self) -> str:
        """As it stands in a job file."""
        return f"{self.place}:{self.qualname}"

    @classmethod
    def of_class(cls, kind: type) -> TaskReference:
        """Where a class says it is defined.

        >>> str(TaskReference.of_class(TaskReference))
        'raycloud.spec.job:TaskReference'
        """
        return cls(kind.__module__, kind.__qualname__)

    @classmethod
    def parse(cls, text: str) -> TaskReference:
        """Split `path/to/file.py:Class` or `package.module:Class`.

        >>> TaskReference.parse("models/gpt.py:Gpt")
        TaskReference(place='models/gpt.py', qualname='Gpt')

        Raises:
            ValueError: With two arguments: what is wrong, and what would do.
        """
        place, colon, qualname = text.rpartition(":")
        if not colon or not place or not qualname:
            at = text.strip(":") or EXAMPLE.partition(":")[0]
            raise ValueError(
                "names no file or module and class",
                f"write `{at}:` and the name of the class, as in {EXAMPLE}",
            )
        if not _CLASS.fullmatch(qualname):
            raise ValueError(
                f"{qualname!r} is not the name of a Python class",
                f"after the last colon stands the class alone, as in {EXAMPLE}",
            )
        reference = cls(place, qualname)
        if reference.file is None and not _MODULE.fullmatch(place):
            raise ValueError(
                f"{place!r} is neither a .py file nor a dotted module",
                f"write a file as in {EXAMPLE}, or a module as in package.module:Gpt",
            )
        if "\0" in place or "\n" in place or not is_unicode(place):
            problem = "holds a character that a path cannot"
            raise ValueError(problem, f"write the file's path, as in {EXAMPLE}")
        return reference


def _format(value: object) -> object:
    if type(value) is int and value > FORMAT:
        raise wrong(
            f"is newer than this raycloud, which reads format {FORMAT}", "install a newer raycloud"
        )
    return value


def _task(value: object) -> str | type:
    if isinstance(value, type):
        return value
    if not isinstance(value, str):
        raise wrong(
            "must be a class, or text that names one",
            f"give the class, or write its place as in {EXAMPLE}; its arguments go in settings",
        )
    try:
        TaskReference.parse(value)
    except ValueError as error:
        raise wrong(*error.args) from None
    return value


class Job(Section):
    """One training run, completely described.

    Raises:
        SpecError: For any mistake, however the job is built; several come as one `SpecErrors`.
    """

    format: Annotated[Literal[1], BeforeValidator(_format)] = 1
    """Version of this file format."""
    name: str = Field(
        default="run",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$",
        json_schema_extra={
            "x-accepts": "1 to 63 of a-z, 0-9, '-' and '_', the first a letter or digit"
        },
    )
    """Name of the run, and of its run directory `runs/<name>-<n>`."""
    task: Annotated[
        str | type[Any],
        PlainValidator(_task),
        WithJsonSchema({"type": "string", "pattern": r"^.+:[^:]+$"}),
    ] = Field(json_schema_extra={"x-accepts": "path/to/file.py:Class or package.module:Class"})
    """The class with model, data and loss: `path/to/file.py:Class` or `package.module:Class`. A
    relative file starts at the directory of the job file. In Python also the class itself."""
    settings: Annotated[dict[str, Any], AfterValidator(plain_settings)] = Field(
        default_factory=dict
    )
    """Keyword arguments of the task's constructor, by name."""
    steps: int | None = Field(default=None, ge=1)
    """Updates of the model until the run ends; or give `epochs`."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data until the run ends; or give `steps`."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Where all randomness starts: initial parameters, order of samples, dropout."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per step, over all workers together."""
    base_batch: int | None = Field(default=None, ge=1)
    """The `global_batch` for which the task's learning rates are right. null: that of this job."""
    rate_scaling: Literal["none", "linear", "sqrt", "adascale"] = "none"
    """How the optimizer's rates follow where `global_batch` is another one. linear: times the
    ratio, for SGD (Goyal et al., 2017). sqrt: times its root, for Adam and its like (Malladi et
    al., 2022). none: not at all. Schedules begin with the rate that this gives (one that names
    rates itself, as OneCycleLR, sets its own); a warm-up has as many steps as before. adascale: by
    a gain of 1 up to the ratio, as the noise of the gradients says, step by step (Johnson et al.,
    2020), for SGD. The schedule, its warm-up too, then counts steps of `base_batch`: an update
    moves it by the gain, up to the end of `steps`; later updates keep its last rate."""
    micro_batch: int = Field(default=4, ge=1)
    """Samples per micro-batch, the smallest piece of a step that a worker takes: its random state
    and its BatchNorm statistics are its own."""
    drop_last: bool = False
    """Whether the short last step of an epoch is left out."""
    fuse: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Micro-batches computed in one pass, at most, where that is exact. auto: all of a worker's
    share at once. Passes are smaller where memory, as a worker finds it, holds no such one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward pass. bf16: autocast, with parameters and reduction
    still in fp32."""
    compile: bool = False
    """Whether the model goes through torch.compile."""
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest norm of the whole gradient, of all that the optimizer moves; a larger one is scaled
    down to it. null: never clipped."""
    data: DataSection = Field(default_factory=DataSection)
    """Where the samples come from."""
    elastic: ElasticSection = Field(default_factory=ElasticSection)
    """How many workers compute, and how a step is split over them."""
    sync: Annotated[
        SyncSection,
        BeforeValidator(
            partial(written_out, "sync"),
            json_schema_input_type=SyncSection | Literal["exact", "auto"],
        ),
    ] = Field(default_factory=SyncSection)
    """How updates travel. exact: the result of a single process, the default of each field. auto:
    each field on auto."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """What is kept, where and how often."""
    errors: ErrorsSection = Field(default_factory=ErrorsSection)
    """What becomes of samples that cannot be computed."""
    servers: Annotated[
        ServersSection,
        BeforeValidator(
            partial(written_out, "servers"),
            json_schema_input_type=ServersSection | int,
        ),
    ] = Field(default_factory=ServersSection)
    """Who holds the rows of the model's `raycloud.Embedding` tables, or exchanges updates where
    `sync.topology` is servers. A number: so many shards."""
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    """When the held-out samples are measured."""
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    """What members reserve, by role."""
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    """To whom the run's numbers are told, beside TensorBoard's files."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(
        cls, values: Any, handler: ModelWrapValidatorHandler[Job], info: ValidationInfo
    ) -> Job:
        """Collect all mistakes of all fields, then those between fields."""
        where: Where = info.context or (lambda _: "")
        try:
            job = handler(values)
        except ValidationError as error:
            mistakes, faults = mistakes_in(error, cls, where)
            if isinstance(values, Mapping):
                mistakes += broken(lambda f: _value(values, cls, f), where, at_fault=faults)
            raise combined(mistakes) from None
        if mistakes := broken(lambda field: _value(job, cls, field), where):
            raise combined(mistakes)
        return job

    @property
    def micro_batches(self) -> int:
        """K, the micro-batches of a full step."""
        return self.global_batch // self.micro_batch

    @property
    def rate_factor(self) -> float:
        """By what the optimizer's learning rates are multiplied from the start.

        >>> job = Job(task="a:B", steps=1, global_batch=64, base_batch=16, rate_scaling="sqrt")
        >>> job.rate_factor
        2.0
        """
        powers = {"sqrt": 0.5, "linear": 1.0}
        return float(self.batch_ratio ** powers.get(self.rate_scaling, 0.0))

    @property
    def batch_ratio(self) -> float:
        """`global_batch`, over that for which the task's rates are right."""
        return self.global_batch / (self.base_batch or self.global_batch)

    @property
    def most_workers(self) -> int:
        """No more workers than a step has micro-batches; a list of shares says for itself."""
        if isinstance(self.elastic.shares, tuple):
            return len(self.elastic.shares)
        most = self.elastic.max_workers
        return self.micro_batches if most == "auto" else min(most, self.micro_batches)

    def bucket_bytes(self, gradient_bytes: int) -> int:
        """Bytes of gradient that travel as one message, of a model with this much of it."""
        asked = self.sync.bucket_bytes
        on_gpu = self.resources.worker.gpus > 0
        found = bucket_bytes(gradient_bytes, on_gpu=on_gpu) if asked == "auto" else asked
        stream = self.sync.stream
        return min(found, gradient_bytes // (2 * stream)) if stream > 1 else found

    @property
    def sync_point(self) -> SyncPoint:
        """How updates travel, every auto decided."""
        asked = self.sync.model_dump(exclude={"bucket_bytes", "outer", "warm_steps", "tour"})
        told = {name: value for name, value in asked.items() if value != "auto"}
        if asked["codec"] == "auto" and asked["topology"] != "ring":
            told["codec"] = "none" if self.resources.worker.gpus else "int4"
        if asked["codec"] == "topk" and asked["ratio"] is None:
            told["ratio"] = _RATIO
        coded = told.get("codec", "none") != "none"
        if self.asynchronous:
            told = {"staleness": _STALENESS, **told}
        return SyncPoint(**{"topology": "tree" if coded else "ring", **told})

    def at(self, point: SyncPoint) -> Job:
        """The same job whose updates travel by this point, which has been checked."""
        told = {name: getattr(point, name) for name in (*POINT_FIELDS, "staleness")}
        return self.model_copy(update={"sync": self.sync.model_copy(update=told)})

    @property
    def tour_points(self) -> tuple[SyncPoint, ...]:
        """What a run measures within itself before it goes on with the fastest; none: no tour.

        The point that the job says comes first. Where each update is to be exact, those of `auto`
        lose nothing; none are on GPUs, whose exchange is another one.
        """
        asked, first = self.sync.tour, self.sync_point
        if asked is None or self.served or self.resources.worker.gpus:
            return ()
        if asked != "auto":
            named = [parse_point(text) for text in asked]
            return tuple(self._point(told) for told in named)
        points = [first, *(SyncPoint(topology=one) for one in ("ring", "direct", "tree"))]
        if self.sync.period != 1 or self.sync.codec != "none":
            points += [SyncPoint(topology="tree", codec=one) for one in ("bf16", "int8", "int4")]
            points += [
                SyncPoint(topology="tree", codec="int4", period=steps)
                for steps in (8, 16)
                if steps <= self.auto_period
            ]
        return tuple(dict.fromkeys(points))

    def _point(self, told: Mapping[str, Any]) -> SyncPoint:
        """What leaves out a topology has that which its codec needs, as in the section."""
        ratio = {"ratio": _RATIO} if told.get("codec") == "topk" and "ratio" not in told else {}
        coded = told.get("codec", "none") != "none"
        return SyncPoint(**{"topology": "tree" if coded else "ring", **ratio, **told})

    @property
    def asynchronous(self) -> bool:
        """Whether workers exchange updates by servers, each when it is ready."""
        return self.served and self.sync.staleness != 0

    @property
    def served(self) -> bool:
        """Whether workers exchange updates by servers."""
        return self.sync.topology == "servers"

    @property
    def most_period(self) -> int:
        """Steps of the longest round: where it is chosen in the run, it begins with 1.

        Workers that wait for nobody meet after so many.
        """
        if self.asynchronous:
            return max(_MEETING_STEPS, _MEETING_PERIODS * self.sync_point.period)
        return self.auto_period if self.sync.period == "auto" else self.sync.period

    @property
    def first_period(self) -> int:
        """Steps of a round at the start."""
        return self.most_period if self.asynchronous else self.sync_point.period

    def round_steps(self, period: int) -> int:
        """Steps of the longest round, where so many are between exchanges."""
        return period if self.sync.stream == 1 else STREAMED_PERIODS * period

    @property
    def auto_period(self) -> int:
        """The most that may be chosen; 1 where something in the job cannot be in rounds."""
        errors = self.errors
        undone = (errors.on_nan, errors.on_error) != ("stop", "stop")
        undone = undone or self.elastic.backup_micro_batches > 0
        return 1 if undone or self.resources.worker.gpus else _MOST_PERIOD

    @property
    def reads(self) -> tuple[int, ...]:
        """After multiples of these steps something reads the state: a round ends there."""
        every = self.checkpoint.every_steps, self.evaluate.every_steps
        return tuple(one for one in every if isinstance(one, int))

    @property
    def measures(self) -> int:
        """`evaluate.every_steps`, unless a checkpoint is written after the same steps; 0: none."""
        measures, writes = self.evaluate.every_steps, self.checkpoint.every_steps
        return measures if measures is not None and measures != writes else 0

    @property
    def warm_steps(self) -> int:
        """Steps before the first round; 0 without rounds. From the job alone: all know it alike."""
        if self.most_period == 1 or (self.asynchronous and self.sync.warm_steps == "auto"):
            return 0
        if self.sync.warm_steps != "auto":
            return self.sync.warm_steps
        return _WARM_STEPS if self.steps is None else min(self.steps // _WARM_PART, _MOST_WARM)

    def resolved(self) -> Job:
        """The same job with `task` as text and every relative path made absolute.

        Paths start at the current directory; `load_job` has already put the job file's directory
        before a relative task file.
        """
        task = TaskReference.of_class(self.task) if isinstance(self.task, type) else None
        reference = task or TaskReference.parse(str(self.task))
        if reference.file is not None:
            reference = TaskReference(_absolute(reference.place), reference.qualname)
        cache = self.data.cache.model_copy(update={"path": _absolute(self.data.cache.path)})
        data = self.data.model_copy(update={"path": _absolute(self.data.path), "cache": cache})
        checkpoint = self.checkpoint.model_copy(update={"path": _absolute(self.checkpoint.path)})
        return self.model_copy(
            update={"task": str(reference), "data": data, "checkpoint": checkpoint}
        )


def _absolute(location: Any) -> Any:
    if location is None or "://" in location or "::" in location:
        return location
    return os.path.normpath(expanded(Path(location)).absolute())


def _value(values: object, section: type[BaseModel], field: str) -> Any:
    """A field's value in a job, or in a mapping that may leave it to its default."""
    name, _, rest = field.partition(".")
    if isinstance(values, Mapping):
        default = section.model_fields[name].get_default(call_default_factory=True)
        value = written_out(name, values.get(name, default))
        if rest and not isinstance(value, Mapping | BaseModel):
            value = default
    else:
        value = getattr(values, name)
    if not rest:
        return value
    inner = section.model_fields[name].annotation
    assert isinstance(inner, type)  # noqa: S101
    return _value(value, inner, rest)
