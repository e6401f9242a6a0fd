"""What must hold between fields of a job: a table, also printed in the job reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.spec.mistakes import NOT_SET, Where, mistake
from raycloud.spec.sections import parse_point

if TYPE_CHECKING:
    from raycloud.errors import SpecError

Lookup = Callable[[str], Any]  # dotted field -> its value
Broken = tuple[str, str]  # problem and hint


@dataclass(frozen=True, slots=True)
class Rule:
    """One relation between dotted fields, and as a sentence; `check` takes their values, in order.

    It returns None where the relation holds. What does not is the fault of the first field.
    """

    fields: tuple[str, ...]
    meaning: str
    check: Callable[..., Broken | None]


def broken(
    lookup: Lookup, where: Where = lambda _: "", *, at_fault: Iterable[str] = ()
) -> list[SpecError]:
    """The mistakes by all rules.

    A rule is left out where one of its fields, or the section around it, is at fault already: what
    it would say about the others could be wrong.
    """
    faults = set(at_fault)
    found: list[SpecError] = []
    for rule in RULES:
        if any(f"{field}.".startswith(f"{fault}.") for fault in faults for field in rule.fields):
            continue
        values = [lookup(field) for field in rule.fields]
        if (told := rule.check(*values)) is not None:
            value = list(values[0]) if isinstance(values[0], tuple) else values[0]
            value = NOT_SET if value is None else value
            found.append(mistake(rule.fields[0], value, *told, where(rule.fields[0])))
            faults.update(rule.fields)
    return found


def _length(steps: int | None, epochs: int | None) -> Broken | None:
    if steps is None and epochs is None:
        return "a job says how long it runs", "write `steps: 1000` or `epochs: 1`"
    if steps is not None and epochs is not None:
        problem = f"epochs = {epochs} says how long the job runs, too"
        return problem, "leave out one of steps and epochs"
    return None


def _whole(global_batch: int, micro_batch: int) -> Broken | None:
    if global_batch % micro_batch == 0:
        return None
    below = global_batch // micro_batch * micro_batch
    near = [str(batch) for batch in (below, below + micro_batch) if batch]
    divisor = next(d for d in range(min(micro_batch, global_batch), 0, -1) if global_batch % d == 0)
    hint = f"write global_batch {' or '.join(near)}, or micro_batch {divisor}"
    return f"is not a multiple of micro_batch = {micro_batch}", hint


def _range(min_workers: int, max_workers: int | str) -> Broken | None:
    if isinstance(max_workers, str) or min_workers <= max_workers:
        return None
    hint = f"write min_workers {max_workers} or less, or max_workers {min_workers} or more"
    return f"is more than elastic.max_workers = {max_workers}", hint


def _busy(min_workers: int, shares: object, global_batch: int, micro_batch: int) -> Broken | None:
    whole = global_batch // micro_batch
    if min_workers <= whole or not isinstance(shares, str):
        return None
    problem = (
        f"a step has only {whole} micro-batches (global_batch / micro_batch), so some workers "
        "would have nothing to do"
    )
    return problem, f"write min_workers {whole} or less, raise global_batch or lower micro_batch"


def _fixed(
    shares: object, min_workers: int, max_workers: int | str, global_batch: int, micro_batch: int
) -> Broken | None:
    if not isinstance(shares, list | tuple):
        return None
    count, total, whole = len(shares), sum(shares), global_batch // micro_batch
    if count == 0:
        return "is an empty list", "write one entry per worker, or auto"
    if min_workers != count or max_workers not in {count, "auto"}:
        hint = f"write elastic.min_workers {count} and elastic.max_workers {count}, or shares auto"
        return f"fixes {count} workers, but the range is {min_workers} to {max_workers}", hint
    if total != whole:
        hint = f"write shares that sum to global_batch / micro_batch = {whole}"
        return f"sums to {total}, but a step has {whole} micro-batches", hint
    return None


def _asked_for(max_workers: int | str, autoscale: bool) -> Broken | None:  # noqa: FBT001 - values of fields
    if isinstance(max_workers, int) or not autoscale:
        return None
    problem = "there is no end to the machines that elastic.autoscale would ask for"
    return problem, "write max_workers 8, or as many as it may cost, or elastic.autoscale false"


def _dealt(partition_by: str, stratify: str | None) -> Broken | None:
    if stratify is None or partition_by == "rows":
        return None
    problem = f"partitions that are dealt by data.stratify = {stratify!r} are equal in rows"
    return problem, "write partition_by rows, or leave out data.stratify"


def _uncoded(topology: object, codec: object) -> Broken | None:
    if topology != "ring" or codec in {"none", "auto"}:
        return None
    problem = f"in a ring each member would encode anew what has come by codec {codec}"
    return problem, "write topology direct, tree or auto, or codec none"


def _topk_in_rounds(codec: object, period: object) -> Broken | None:
    if codec != "topk" or period not in {1, "auto"}:
        return None
    travel = "travel" if period == 1 else "may travel"
    problem = f"with sync.period = {period} gradients {travel}, of which it would leave most out"
    return problem, "write sync.period 16, or another number, or codec int4"


def _topk_with_servers(codec: object, topology: object) -> Broken | None:
    if codec != "topk" or topology != "servers":
        return None
    problem = "of the parameters that servers answer with it would leave most out"
    return problem, "write codec int4, or topology direct, tree or auto"


def _kept_by_topk(ratio: object, codec: object) -> Broken | None:
    if ratio is None or codec == "topk":
        return None
    return f"codec {codec} sends all values", "write codec topk, or leave ratio out"


def _staleness(staleness: object, topology: object) -> Broken | None:
    if topology == "servers" or staleness in {0, "auto"}:
        return None
    problem = f"with topology {topology} all exchange at the same time"
    return problem, "write staleness 0, or topology servers"


def _served(topology: object, staleness: object, shards: int, copies: int) -> Broken | None:
    if topology != "servers" or (shards and not (copies and staleness)):
        return None
    if shards:
        problem = f"parameters on servers have no copies there, and servers.copies is {copies}"
        return problem, "leave servers.copies out: each worker has what a round began with"
    return "there are no servers for it", "write servers 1, or more"


def _outer_with_servers(outer: object, topology: object, staleness: object) -> Broken | None:
    if topology != "servers" or not staleness or outer != "nesterov":
        return None
    return "servers add what workers have moved, without momentum", "write outer mean or auto"


def _stops_with_servers(
    topology: object, staleness: object, on_error: str, on_nan: str, backup: int
) -> Broken | None:
    stops = (on_error, on_nan, backup) == ("stop", "stop", 0)
    if topology != "servers" or not staleness or stops:
        return None
    problem = "what a worker has sent to servers cannot be taken back for a sample's sake"
    return problem, "leave out errors.on_error, errors.on_nan and elastic.backup_micro_batches"


def _stops_in_rounds(period: object, on_nan: str) -> Broken | None:
    if period in {1, "auto"} or on_nan == "stop":
        return None
    problem = f"a step of a round cannot be undone alone, as errors.on_nan = {on_nan} has it"
    return problem, "write period 1, or errors.on_nan stop"


def _backed_up_in_rounds(period: object, backup_micro_batches: int) -> Broken | None:
    if period in {1, "auto"} or not backup_micro_batches:
        return None
    problem = (
        "in a round workers have unlike weights, so none can compute for another, as "
        f"elastic.backup_micro_batches = {backup_micro_batches} has it"
    )
    return problem, "write period 1, or elastic.backup_micro_batches 0"


def _streamed(stream: int, period: object, topology: object, on_error: str) -> Broken | None:
    if stream == 1:
        return None
    if not isinstance(period, int) or period == 1:
        problem = f"fragments of a round travel, and with sync.period = {period} there "
        told = "may be none" if period == "auto" else "are none"
        return problem + told, "write period 16, or leave stream out"
    if period % stream:
        problem = f"each of so many fragments has its turn once in sync.period = {period} steps"
        fits = max(period // stream, 1) * stream
        return problem, f"write stream {_divisor(period, stream)}, or period {fits}"
    if topology == "servers":
        return "servers take whole updates", "write topology direct, tree or ring, or no stream"
    if on_error != "stop":
        problem = "what has travelled of a sample cannot be left out, as errors.on_error = "
        return f"{problem}{on_error} has it", "write errors.on_error stop, or leave stream out"
    return None


def _divisor(period: int, most: int) -> int:
    """The largest divisor of `period` that is no more than `most`, at least 2."""
    return next((d for d in range(min(most, period), 1, -1) if period % d == 0), period)


def _read_while_streamed(stream: int, period: object, every_steps: object) -> Broken | None:
    if stream == 1 or not isinstance(every_steps, int) or not isinstance(period, int):
        return None
    if every_steps >= 2 * period:
        return None
    problem = f"all is exchanged at once after {every_steps} steps, where something reads the state"
    return problem, f"have it read after {2 * period} steps or more, or leave stream out"


def _read_in_rounds(period: Any, every_steps: object) -> Broken | None:
    if period == "auto" or not isinstance(every_steps, int) or every_steps >= period:
        return None
    return f"no round would be longer than {every_steps}: something reads the state then", (
        f"write period {every_steps} or less, or have it read after {period} steps or more"
    )


def _toured(tour: object, *fields: object) -> Broken | None:
    """Each point of a tour is one that the job could have asked for."""
    for text in tour if isinstance(tour, list | tuple) else ():
        told = {"codec": "none", "period": 1, "topology": "auto", "ratio": None}
        told |= parse_point(text)
        if (found := _untraveled(told, *fields)) is not None:
            return f"has the point {text!r}: {found[0]}", found[1]
    return None


def _untraveled(told: dict[str, Any], *fields: Any) -> Broken | None:
    """What is wrong with a point that has these fields, in a job with these others."""
    scaling, on_nan, backup, saved, measured = fields
    codec, period, topology = told["codec"], told["period"], told["topology"]
    broken_by = (
        _uncoded(topology, codec),
        _topk_in_rounds(codec, period),
        _kept_by_topk(told["ratio"], codec),
        _stops_in_rounds(period, on_nan),
        _backed_up_in_rounds(period, backup),
        _read_in_rounds(period, saved),
        _read_in_rounds(period, measured),
        _adascale_exchanges(scaling, period, codec, topology, 0),
    )
    return next((one for one in broken_by if one is not None), None)


def _adascale(
    scaling: str, global_batch: int, base_batch: int | None, min_workers: int
) -> Broken | None:
    if scaling != "adascale":
        return None
    if base_batch is None:
        return "is by how much global_batch is larger than base_batch", "write base_batch, too"
    if global_batch < base_batch:
        problem = f"is for larger batches: global_batch = {global_batch} is below base_batch = "
        return f"{problem}{base_batch}", "write linear or sqrt"
    if min_workers < 2:  # noqa: PLR2004 - of one nothing differs
        problem = "goes by what the gradients of several workers differ by, and elastic.min_workers"
        return f"{problem} = {min_workers}", "write elastic.min_workers 2 or more"
    return None


def _adascale_exchanges(
    scaling: str, period: object, codec: object, topology: object, staleness: object
) -> Broken | None:
    if scaling != "adascale":
        return None
    for field, value, wanted in (("period", period, 1), ("codec", codec, "none")):
        if value != wanted:
            problem = f"measures the gradients of each step as they are, not with sync.{field} = "
            return f"{problem}{value}", f"write sync.{field} {wanted}, or sqrt or linear"
    if topology == "servers" and staleness:
        problem = f"goes by steps that all take together, not with sync.staleness = {staleness}"
        return problem, "write sync.staleness 0, or sqrt or linear"
    return None


_RANGE = ("elastic.min_workers", "elastic.max_workers")
_BATCHES = ("global_batch", "micro_batch")
RULES: tuple[Rule, ...] = (
    Rule(("steps", "epochs"), "Exactly one of `steps` and `epochs` is set.", _length),
    Rule(_BATCHES, "`global_batch` is a multiple of `micro_batch`.", _whole),
    Rule(_RANGE, "`elastic.min_workers` is at most `elastic.max_workers`.", _range),
    Rule(
        ("elastic.max_workers", "elastic.autoscale"),
        "With `elastic.autoscale`, `elastic.max_workers` is a number.",
        _asked_for,
    ),
    Rule(
        ("elastic.min_workers", "elastic.shares", *_BATCHES),
        "Unless shares are a list, `elastic.min_workers` is at most `global_batch / micro_batch`.",
        _busy,
    ),
    Rule(
        ("rate_scaling", "global_batch", "base_batch", "elastic.min_workers"),
        "With `rate_scaling` adascale, `base_batch` is set, and `global_batch` is no less, and "
        "`elastic.min_workers` is at least 2.",
        _adascale,
    ),
    Rule(
        ("rate_scaling", "sync.period", "sync.codec", "sync.topology", "sync.staleness"),
        "With `rate_scaling` adascale, `sync.period` is 1, `sync.codec` none, and, where "
        "`sync.topology` is servers, `sync.staleness` 0.",
        _adascale_exchanges,
    ),
    Rule(
        ("elastic.shares", *_RANGE, *_BATCHES),
        "A list in `elastic.shares` has one entry per worker, `elastic.min_workers` and "
        "`elastic.max_workers` are both its length, and it sums to `global_batch / micro_batch`.",
        _fixed,
    ),
    Rule(
        ("data.partition_by", "data.stratify"),
        "With `data.stratify`, `data.partition_by` is rows.",
        _dealt,
    ),
    Rule(
        ("sync.topology", "sync.codec"),
        "With a codec, `sync.topology` is not ring.",
        _uncoded,
    ),
    Rule(
        ("sync.codec", "sync.period"),
        "With `sync.codec` topk, `sync.period` is 2 or more.",
        _topk_in_rounds,
    ),
    Rule(
        ("sync.codec", "sync.topology"),
        "With `sync.codec` topk, `sync.topology` is not servers.",
        _topk_with_servers,
    ),
    Rule(
        ("sync.ratio", "sync.codec"),
        "Without `sync.codec` topk, `sync.ratio` is null.",
        _kept_by_topk,
    ),
    Rule(
        (
            "sync.tour",
            "rate_scaling",
            "errors.on_nan",
            "elastic.backup_micro_batches",
            "checkpoint.every_steps",
            "evaluate.every_steps",
        ),
        "Each point of `sync.tour` is one that the job could have asked for.",
        _toured,
    ),
    Rule(
        ("sync.tour", "sync.topology"),
        "With `sync.topology` servers there is no tour.",
        lambda tour, topology: (
            None
            if tour is None or topology != "servers"
            else ("updates that travel by servers cannot change to another way", "leave tour out")
        ),
    ),
    Rule(
        ("elastic.autoscale", "data.collators"),
        "With `elastic.autoscale`, `data.collators` is a number.",
        lambda autoscale, collators: (
            ("roles are chosen by the machines that are there", "write data.collators 0 or more")
            if autoscale and collators == "auto"
            else None
        ),
    ),
    Rule(
        ("sync.tour", "sync.stream"),
        "With a `sync.stream` of more than 1 there is no tour.",
        lambda tour, stream: (
            None
            if tour is None or stream == 1
            else ("rounds with fragments cannot change to another way", "leave tour out")
        ),
    ),
    Rule(
        ("sync.staleness", "sync.topology"),
        "`sync.staleness` is 0, unless `sync.topology` is servers.",
        _staleness,
    ),
    Rule(
        ("sync.topology", "sync.staleness", "servers.shards", "servers.copies"),
        "With `sync.topology` servers there are some, without copies if `sync.staleness` is not 0.",
        _served,
    ),
    Rule(
        ("sync.outer", "sync.topology", "sync.staleness"),
        "With a `sync.staleness` other than 0, `sync.outer` is not nesterov.",
        _outer_with_servers,
    ),
    Rule(
        (
            "sync.topology",
            "sync.staleness",
            "errors.on_error",
            "errors.on_nan",
            "elastic.backup_micro_batches",
        ),
        "With a `sync.staleness` other than 0, errors stop the run, and there are no backups.",
        _stops_with_servers,
    ),
    Rule(
        ("sync.period", "errors.on_nan"),
        "With a `sync.period` of more than 1, `errors.on_nan` is stop.",
        _stops_in_rounds,
    ),
    Rule(
        ("sync.period", "elastic.backup_micro_batches"),
        "With a `sync.period` of more than 1, `elastic.backup_micro_batches` is 0.",
        _backed_up_in_rounds,
    ),
    *(
        Rule(
            ("sync.period", reads),
            f"`sync.period` is at most `{reads}`, where that is a number.",
            _read_in_rounds,
        )
        for reads in ("checkpoint.every_steps", "evaluate.every_steps")
    ),
    Rule(
        ("sync.stream", "sync.period", "sync.topology", "errors.on_error"),
        "With a `sync.stream` of more than 1, `sync.period` is a multiple of it, `sync.topology` "
        "not servers, and `errors.on_error` stop.",
        _streamed,
    ),
    *(
        Rule(
            ("sync.stream", "sync.period", reads),
            f"With a `sync.stream` of more than 1, `{reads}`, where it is a number, is at least "
            "twice `sync.period`.",
            _read_while_streamed,
        )
        for reads in ("checkpoint.every_steps", "evaluate.every_steps")
    ),
)
