"""The sections of a job. Every field's description is its text in the job reference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from raycloud.spec.mistakes import OURS, combined, mistakes_in
from raycloud.spec.yaml_text import is_unicode

Auto = Literal["auto"]
_LONGEST_ROUND = 1 << 20  # steps


def wrong(problem: str, hint: str, *, below: str = "", value: object = None) -> PydanticCustomError:
    """What a check of one field raises; `below`: the place inside it, where `value` stands."""
    # In a list, since pydantic insists that text itself be UTF-8.
    context = {"problem": problem, "hint": hint, "below": below, "value": [value]}
    return PydanticCustomError(OURS, "refused", context)


def _location(text: str) -> str:
    if not text.strip():
        raise wrong("is empty", "write a path or URL, or null for the default")
    if "\0" in text or "\n" in text or not is_unicode(text):
        raise wrong("holds a character that a path cannot", "write one path or URL")
    return text


Location = Annotated[
    str, AfterValidator(_location), Field(json_schema_extra={"x-accepts": "a path or URL"})
]


class Section(BaseModel):
    """A part of the job: frozen, no unknown fields, no silent conversions.

    Raises:
        SpecError: From the constructor, for any mistake.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise combined(mistakes_in(error, type(self))[0]) from None

    # Sections inside a job are then checked by pydantic itself, which collects their mistakes,
    # rather than through this constructor, which would stop at the first section with one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ReadingPrices(Section):
    """What a store asks for reading out of it, in any currency."""

    per_gb: _Price = 0.0
    """Of each gigabyte."""
    per_1000_requests: _Price = 0.0
    """Of a thousand requests; each file is one, at least."""


class KeepingPrices(Section):
    """What a store asks for what is kept there, in any currency."""

    per_gb_month: _Price = 0.0
    """Of each gigabyte for a month."""
    per_1000_requests: _Price = 0.0
    """Of a thousand requests to write; each file is one, at least."""


class CacheSection(Section):
    """Where preprocessed rows are kept, on each node. Used by tasks that return a `Source`."""

    path: Location | None = None
    """Directory for blocks on each node's own disk; runs share it. null: `RAYCLOUD_CACHE`, else
    `raycloud` in `XDG_CACHE_HOME` or in `~/.cache`."""
    memory_bytes: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Bytes of blocks that each node pins in shared memory; the others are mapped from disk. auto:
    half of the node's object store."""
    disk_bytes: int | None = Field(default=None, ge=0)
    """Bytes of blocks that each node keeps on disk: what no run has used for longest goes first,
    and never what this run needs. null: no limit."""
    price_per_gb_month: float | None = Field(default=None, ge=0)
    """What a gigabyte on the cache's disk costs a month, in any currency, for the report. null: the
    report leaves the cost out."""


class DataSection(Section):
    """Where the samples come from, and how they are fed."""

    path: Location | None = None
    """File, directory or URL of the data. A relative path starts at the current directory. null:
    the task's own default."""
    shuffle: bool = True
    """Whether each epoch has a new order, drawn from `seed`. false: the order of the data set, in
    every epoch."""
    prefetch_steps: int = Field(default=2, ge=1, le=64)
    """Steps whose batches are made ready ahead of the one being computed."""
    partition_by: Literal["rows", "bytes"] = "rows"
    """What partitions of a `Source` are equal in. Partitions are what an epoch permutes first; rows
    are then mixed inside a window of them."""
    partition_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Size that partitions are cut to, at most. They are smaller where there would be too few to
    deal out."""
    stratify: str | None = Field(default=None, min_length=1)
    """Column of a `Source` by which rows are dealt to partitions, so that each has the data set's
    mix of it. null: rows stay with their neighbours."""
    window: int = Field(default=8, ge=1)
    """Partitions whose rows are mixed with each other. More mixes better, fewer reads less at a
    time."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do about rows of a `Source` that cannot be used. refuse: end with an error that names
    them. skip: leave them out, count them, and name the first."""
    cpus: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most CPU cores that read and preprocess a `Source` at once, over the cluster. auto: all
    before the first step, one while training."""
    threads: int = Field(default=1, ge=1, le=64)
    """Threads that make batches in each worker."""
    collators: Annotated[int, Field(ge=0)] | Auto = 0
    """Processes on any node's CPUs, one core each, that make batches in the workers' place, for
    augmentation that is too much for them. 0: workers make their own. auto: nodes are measured
    before the start, and each trains or makes batches, by which steps are fastest; there may be no
    such processes then, too."""
    refresh: bool = False
    """Whether files that are added to a `Source` while training are taken up by the next epoch. A
    resumed run takes them up either way."""
    cache: CacheSection = Field(default_factory=CacheSection)
    """Where preprocessed rows are kept."""
    prices: ReadingPrices | None = None
    """What reading from `path` costs, in any currency: `per_gb`, and `per_1000_requests` (each file
    is one); for what `plan` says of reading once and again. null: it says nothing of money."""

    @property
    def collator_count(self) -> int:
        """How many `collators` are asked for; 0 where that is to be chosen."""
        return 0 if self.collators == "auto" else self.collators


class ElasticSection(Section):
    """How many workers compute, and how a step is split over them."""

    min_workers: int = Field(default=1, ge=1)
    """Fewest workers the run begins and computes with. Where some are ready and others take far
    longer, those begin, and the others join as they come."""
    max_workers: Annotated[int, Field(ge=1)] | Auto = 2
    """Most workers the run computes with. auto: as many as the machines hold, and no more than a
    step has micro-batches; as many as `shares` has entries, if it is a list."""
    shares: (
        Literal["auto", "equal"]
        | Annotated[
            tuple[Annotated[int, Field(ge=0)], ...],
            BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        ]
    ) = "auto"
    """Micro-batches per step of each worker. auto: fitted to measured speed, before and while
    running. equal: the same for all. A list fixes them, one entry per worker."""
    orphan_s: int = Field(default=120, ge=10, le=86_400)
    """Seconds that workers on a cluster which the command joined go on without it, if it is killed.
    Until then `--resume` takes them over; after that they end."""
    backup_micro_batches: int = Field(default=0, ge=0)
    """The last micro-batches of each worker's share, at most so many, that another worker computes
    as well where their own one is late: the first result counts, once. They share no pass with
    those before them. 0: no such backups."""
    autoscale: bool = False
    """Whether Ray's autoscaler is asked for machines, up to `max_workers`. Workers for which there
    is no room then wait for a place, which it sees, until they have one or are not wanted."""


STREAMED_PERIODS = 4  # until workers that exchange fragments all have the same again


POINT_FIELDS = ("codec", "topology", "period", "ratio")
_POINT_WORDS = {
    "codec": ("none", "bf16", "int8", "int4", "topk"),
    "topology": ("ring", "direct", "tree"),
}


def parse_point(text: str) -> dict[str, Any]:
    """What `codec=int4 topology=tree` says, by field; `ValueError` says what is wrong with it.

    >>> parse_point("sync.codec=int4 period=8")
    {'codec': 'int4', 'period': 8}
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, is_set, value = word.removeprefix("sync.").partition("=")
        if not is_set or name not in POINT_FIELDS:
            raise ValueError(f"{word!r} is not one of {', '.join(f'{n}=…' for n in POINT_FIELDS)}")
        if name in _POINT_WORDS:
            if value not in _POINT_WORDS[name]:
                raise ValueError(f"{name} is one of {', '.join(_POINT_WORDS[name])}, not {value!r}")
            found[name] = value
        elif not value.isascii() or not value.isdigit() or not 1 <= int(value) <= _LONGEST_ROUND:
            raise ValueError(f"{name} is a number from 1 to {_LONGEST_ROUND}, not {value!r}")
        else:
            found[name] = int(value)
    if not found:
        raise ValueError(f"it names none of {', '.join(POINT_FIELDS)}")
    return found


def _tour(value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
    if not isinstance(value, tuple):
        return value
    hint = "write each point as `codec=int4 topology=tree period=8`, or auto for all of them"
    if len(value) < 2:  # noqa: PLR2004 - of one there is nothing to choose
        raise wrong("names fewer than two points", hint)
    for text in value:
        try:
            parse_point(text)
        except ValueError as error:
            raise wrong(f"has the point {text!r}, of which {error}", hint) from error
    return value


class SyncSection(Section):
    """How updates travel. `sync: exact` is each default; `sync: auto` lets raycloud choose."""

    period: Annotated[int, Field(ge=1)] | Auto = 1
    """Steps between two exchanges, a round. 1: each step is that of the whole batch. More: each
    worker makes these steps with its own share of them, and what is exchanged at the end is how far
    it has come (local SGD). A round ends early where the state is read: before a checkpoint, a
    measurement, a change of workers or shares. auto: 1 where what an exchange takes beyond what
    computing hides is at most 8% of a step, or on GPUs; else 8 or 16, the least that leaves 4%, by
    what is measured as the run goes on; 1 again where workers move theirs in directions that have
    little in common. Shorter rounds than 8 lose more, not less, with Adam and its like. It stays 1
    with a staleness, and with what rounds refuse: an `errors.on_nan` or `errors.on_error` other
    than stop, backups, an optimizer that keeps what has no mean."""
    outer: Literal["mean", "nesterov", "auto"] = "auto"
    """How a round moves the weights. mean: by the weighted mean of what workers have moved theirs.
    nesterov: by that with momentum 0.85 and a rate of sqrt(period / 32), at most 1, after DiLoCo.
    auto: mean where the optimizer is SGD, else nesterov. With a period of 1 there are no rounds,
    and it is of no effect."""
    stream: int = Field(default=1, ge=1)
    """Fragments of the model that travel while workers compute, with a `period` of 2 or more. 1:
    none, a round's exchange waits for its end. More: whole parameters are put into so many
    fragments of about equal bytes. In each period each is exchanged once, in turns, so that a link
    carries one in period / stream steps; what has come by the next turn is applied then, beside
    what the worker has done since (Streaming DiLoCo). After 4 periods, and early where a round ends
    early, all is exchanged at once, and the round ends."""
    warm_steps: Annotated[int, Field(ge=0)] | Auto = "auto"
    """First steps of the run that are exchanged one by one, before rounds begin: what the model
    learns then matters most. auto: a seventh of `steps`, at most 500; 200 where the job is
    measured in epochs."""
    topology: Literal["ring", "direct", "tree", "servers", "auto"] = "auto"
    """Between whom updates are exchanged. ring: each member sends to the next one. direct: each
    sums a part of the gradient and sends the sum to all, in two latencies; of two each sends all.
    tree: the same between zones, with the codec, of sums that are made inside each zone without it.
    A node's zone is its label `ray.io/availability-zone`; one without it is a zone of its own.
    Where all are in one zone, or each in its own, that is direct. servers: each sends a part to
    each of the `servers`, which sum what comes; with another `staleness` than 0 each makes its own
    steps, and waits for the others only as that says. auto: tree with a codec, else ring."""
    staleness: Annotated[int, Field(ge=0)] | Literal["unbounded", "auto"] = 0
    """By how many updates a worker may be ahead of the slowest; 0: lockstep. More, as stale
    synchronous parallel has it, and unbounded (asynchronous, until all meet, after 16 steps or
    twice `period`) are with servers alone. auto: 2 with servers, else 0."""
    codec: Literal["none", "bf16", "int8", "int4", "topk", "auto"] = "none"
    """How gradients are compressed on their way: bf16 to a half of fp32's bytes, int8 to 1/3.9,
    int4 to 1/6.4, between two workers or two zones to 1/7.5. What that loses is kept and sent with
    the next step's (error feedback). Those of other types go as they are. topk: of what a round has
    moved, one value in `ratio`, as its place and two bits; steps that are exchanged one by one go
    as int4. auto: int4; none on GPUs, and in a ring."""
    ratio: Literal[2, 4, 8, 16, 32, 64, 128, 256] | None = None
    """With codec topk, of how many values the largest is sent. With 4 a round travels in 1/28 of
    fp32's bytes, with 8 in 1/46, with 32 in 1/136. What is not sent is kept until it is, for about
    as many rounds: where a run has few, large ratios cost much of the loss. null: 4 with topk, else
    there is none."""
    bucket_bytes: Annotated[int, Field(ge=1024)] | Auto = "auto"
    """Bytes of gradient that travel as one message; smaller ones start earlier, larger ones cost
    less per byte. auto: an eighth of the gradient, between 1 and 4 MiB, on a GPU 25."""

    tour: Annotated[
        Auto
        | Annotated[
            tuple[str, ...],
            BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        ]
        | None,
        AfterValidator(_tour),
    ] = None
    """Points that the run measures within itself before it goes on with the fastest, each written
    as by `raycloud set`: `codec=int4 topology=tree period=8`; what one leaves out is the default.
    auto: those that lose nothing, where this section is exact; else also bf16, int8 and int4, and
    rounds of 8 and 16 steps where the job can be in rounds. A point is kept for 5 steps that are
    not looked at and 20 that are, or as many rounds, and a change costs less than a second. null:
    no tour."""


SYNC_WORDS: dict[str, dict[str, str]] = {  # what `sync: WORD` stands for
    "exact": {},
    "auto": dict.fromkeys(("period", "topology", "staleness", "codec"), "auto"),
}


def written_out(field: str, value: Any) -> Any:
    """A section, where one word or number in its place stands for it; else the value itself.

    >>> written_out("servers", 2), written_out("sync", "exact"), written_out("servers", "two")
    ({'shards': 2}, {}, 'two')
    """
    if field == "sync" and isinstance(value, str):
        return dict(SYNC_WORDS[value]) if value in SYNC_WORDS else value
    if field == "servers" and type(value) is int:
        return {"shards": value}
    return value


class CheckpointSection(Section):
    """What is kept, where and how often."""

    path: Location | None = None
    """Directory or fsspec URL for checkpoints. A relative path starts at the current directory.
    null: `checkpoints/` in the run directory."""
    every_steps: Annotated[int, Field(ge=1)] | Auto | None = "auto"
    """Steps between two checkpoints. `auto`: as often as is worth it, by what one costs and how
    often workers are lost. null: only when the run ends or is stopped."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    prices: KeepingPrices | None = None
    """What keeping checkpoints at `path` costs, in any currency: `per_gb_month`, and
    `per_1000_requests` to write; for `plan`. null: it says nothing of that."""
    most_failed: int = Field(default=10, ge=1)
    """Checkpoints in a row that cannot be written, until the run ends. Another one is tried 5 s
    after the first, then after twice as long each time, at most 5 min; training goes on
    meanwhile."""


class ErrorsSection(Section):
    """What becomes of samples that cannot be computed, and of steps that are not finite."""

    on_error: Literal["stop", "skip"] = "stop"
    """A micro-batch that fails twice: the task raises on it, or the workers that compute it die.
    stop: end with an error that names its samples. skip: leave it out of its step, whose mean is
    then that of the others."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """A step whose loss or gradient is not finite. stop: end before it changes anything. skip: go
    on without it; model, optimizer and schedule stay as they are. rollback: go back to the newest
    checkpoint that is sound, and on from there without the step that made it so: this one, or an
    earlier one whose update did."""
    most_skipped: int = Field(default=10, ge=1)
    """Micro-batches, and likewise steps that are not finite, that may be skipped in the whole run;
    one more ends it."""
    most_nan_in_a_row: int = Field(default=3, ge=1)
    """Steps in a row that may be skipped as not finite; one more ends the run."""


class EvaluateSection(Section):
    """When the held-out samples are measured."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between two measurements. null: once, at the end."""
    max_samples: int | None = Field(default=None, ge=1)
    """Most held-out samples measured. null: all of them."""
    batch: int = Field(default=32, ge=1)
    """Held-out samples per forward pass."""


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{{0,251}}[A-Za-z0-9])?/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"!?(?:{_NAME}|in\({_NAME}(?:, ?{_NAME})*\))")


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise wrong(
                f"{key!r} is not the name of a node label",
                "write at most 63 letters, digits, '-', '_' and '.', as in ray.io/accelerator-type",
            )
        if not _LABEL_VALUE.fullmatch(value):
            raise wrong(
                "is not a value to select nodes by",
                "write spot, !spot, in(a, b) or !in(a, b)",
                below=key,
                value=value,
            )
    return labels


class RoleResources(Section):
    """What one member of a role reserves on its node."""

    cpus: int = Field(default=1, ge=1)
    """CPU cores, and threads that compute."""
    gpus: int = Field(default=0, ge=0, le=1)
    """GPUs: 0 computes on the CPU."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of main memory reserved. null: none reserved."""
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field(default_factory=dict)
    """Labels a node must carry, by name: a value, `!value`, `in(a, b)` or `!in(a, b)`."""


def _no_server(role: object) -> object:
    if role is not None:
        raise wrong("servers reserve nothing", "leave it out: `servers` says how many there are")
    return role


class ResourcesSection(Section):
    """What members reserve, by role."""

    worker: RoleResources = Field(default_factory=RoleResources)
    """One worker."""
    server: Annotated[RoleResources | None, BeforeValidator(_no_server)] = None
    """One server. Servers reserve nothing: leave it out."""


class ServersSection(Section):
    """Processes that hold tables' rows, or exchange updates. They reserve no CPU."""

    shards: int = Field(default=0, ge=0, le=1024)
    """How many parts all of that is in, a server for each. 0: no server holds anything."""
    copies: int = Field(default=0, ge=0, le=2)
    """Further servers for each shard, with the same rows, on other nodes where there are some. With
    one, the loss of a server costs no step. 0: all go back to the newest checkpoint then."""


class MlflowSection(Section):
    """Numbers for an MLflow server or store. Needs raycloud's extra `mlflow`."""

    uri: Location | None = None
    """Where MLflow keeps its runs: `http://host:port` of a server, or
    `sqlite:////path/to/mlflow.db`. A password in it is written as `${NAME}` and taken from the
    environment. null: MLflow is not used."""
    experiment: str | None = Field(default=None, min_length=1)
    """The experiment that the run belongs to. null: the job's name."""


class WandbSection(Section):
    """Numbers for Weights & Biases. Needs raycloud's extra `wandb`."""

    mode: Literal["off", "offline", "online"] = "off"
    """offline: kept in `wandb/` in the run directory, for `wandb sync`. online: also sent at once,
    with the key in `WANDB_API_KEY` or from `wandb login`. off: not used."""
    project: str | None = Field(default=None, min_length=1)
    """The project that the run belongs to. null: the job's name."""
    entity: str | None = Field(default=None, min_length=1)
    """The team or user that owns the project. null: the key's own."""


class TrackingSection(Section):
    """To whom the run's numbers are told, beside TensorBoard's files, which are always written."""

    mlflow: MlflowSection = Field(default_factory=MlflowSection)
    """MLflow."""
    wandb: WandbSection = Field(default_factory=WandbSection)
    """Weights & Biases."""


_DEEPEST = 32  # levels of lists and names
_LARGEST = 10**300  # whole numbers stay below: more digits read back as text


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A copy that YAML can hold and give back equal: tuples become lists.

    Raises:
        PydanticCustomError: A value is of a type that a job file cannot hold.
    """
    odd = [key for key in settings if not is_unicode(key)]
    if odd:
        raise wrong(f"has the name {odd[0]!r}", "a name is text")
    return {key: _plain(value, (key,)) for key, value in settings.items()}


def _plain(value: object, at: tuple[str, ...]) -> object:
    below = ".".join(at)
    if len(at) > _DEEPEST:
        raise wrong(f"goes deeper than {_DEEPEST} levels", "flatten it", below=at[0], value=...)
    if isinstance(value, Mapping):
        odd = [key for key in value if type(key) is not str or not is_unicode(key)]
        if odd:
            raise wrong(f"has the name {odd[0]!r}", "a name is text", below=below, value=value)
        return {key: _plain(entry, (*at, key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, (*at, str(i))) for i, entry in enumerate(value)]
    if isinstance(value, str) and not is_unicode(value):
        raise wrong("is not Unicode text", "write bytes in hexadecimal", below=below, value=value)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise wrong("is too large for a job file", "write it as text", below=below, value="…")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(
            "is not a finite number",
            "write it as text and convert it in the task",
            below=below,
            value=value,
        )
    if type(value) not in {str, int, float, bool, type(None)}:
        raise wrong(
            f"a job file cannot hold a value of type {type(value).__name__}",
            "give text, a number, true, false, null, a list or names with values",
            below=below,
            value=value,
        )
    return value
