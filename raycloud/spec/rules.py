"""What must hold between fields of a job: a table, also printed in the job reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from raycloud.spec.mistakes import NOT_SET, Mistake

Lookup = Callable[[str], Any]  # dotted field -> its value


@dataclass(frozen=True, slots=True)
class Rule:
    """One relation between fields.

    Attributes:
        fields: The fields it relates, dotted; `check` takes their values in this order.
        meaning: The relation as a sentence, for people.
        check: Returns the mistake, or `None` where the relation holds.
    """

    fields: tuple[str, ...]
    meaning: str
    check: Callable[..., Mistake | None]


def broken(lookup: Lookup, *, at_fault: Iterable[str] = ()) -> list[Mistake]:
    """The mistakes by all rules.

    A rule is left out where one of its fields, or the section around it, is at fault already: what
    it would say about the others could be wrong.
    """
    faults = set(at_fault)
    found: list[Mistake] = []
    for rule in RULES:
        if any(_covers(fault, field) for fault in faults for field in rule.fields):
            continue
        mistake = rule.check(*(lookup(field) for field in rule.fields))
        if mistake is not None:
            found.append(mistake)
            faults.update(rule.fields)
    return found


def _covers(fault: str, field: str) -> bool:
    return field == fault or field.startswith(f"{fault}.")


def _length(steps: int | None, epochs: int | None) -> Mistake | None:
    if steps is None and epochs is None:
        return Mistake(
            field="steps",
            value=NOT_SET,
            problem="a job says how long it runs",
            hint="write `steps: 1000` or `epochs: 1`",
        )
    if steps is not None and epochs is not None:
        return Mistake(
            field="steps",
            value=steps,
            problem=f"epochs = {epochs} says how long the job runs, too",
            hint="leave out one of steps and epochs",
        )
    return None


def _whole(global_batch: int, micro_batch: int) -> Mistake | None:
    if global_batch % micro_batch == 0:
        return None
    below = global_batch // micro_batch * micro_batch
    near = [str(batch) for batch in (below, below + micro_batch) if batch]
    divisor = next(d for d in range(min(micro_batch, global_batch), 0, -1) if global_batch % d == 0)
    return Mistake(
        field="global_batch",
        value=global_batch,
        problem=f"is not a multiple of micro_batch = {micro_batch}",
        hint=f"write global_batch {' or '.join(near)}, or micro_batch {divisor}",
    )


def _range(min_workers: int, max_workers: int) -> Mistake | None:
    if min_workers <= max_workers:
        return None
    return Mistake(
        field="elastic.min_workers",
        value=min_workers,
        problem=f"is more than elastic.max_workers = {max_workers}",
        hint=f"write min_workers {max_workers} or less, or max_workers {min_workers} or more",
    )


def _busy(min_workers: int, shares: object, global_batch: int, micro_batch: int) -> Mistake | None:
    whole = global_batch // micro_batch
    if min_workers <= whole or not isinstance(shares, str):
        return None
    return Mistake(
        field="elastic.min_workers",
        value=min_workers,
        problem=f"a step has only {whole} micro-batches (global_batch / micro_batch), so some "
        "workers would have nothing to do",
        hint=f"write min_workers {whole} or less, raise global_batch or lower micro_batch",
    )


def _fixed(
    min_workers: int, max_workers: int, shares: object, global_batch: int, micro_batch: int
) -> Mistake | None:
    if isinstance(shares, str) or not isinstance(shares, list | tuple):
        return None
    count, total, whole = len(shares), sum(shares), global_batch // micro_batch
    if count == 0:
        problem, hint = "is an empty list", "write one entry per worker, or auto"
    elif min_workers != count or max_workers != count:
        problem = f"fixes {count} workers, but the range is {min_workers} to {max_workers}"
        hint = f"write elastic.min_workers {count} and elastic.max_workers {count}, or shares auto"
    elif total != whole:
        problem = f"sums to {total}, but a step has {whole} micro-batches"
        hint = f"write shares that sum to global_batch / micro_batch = {whole}"
    else:
        return None
    return Mistake(field="elastic.shares", value=list(shares), problem=problem, hint=hint)


def _dealt(stratify: str | None, partition_by: str) -> Mistake | None:
    if stratify is None or partition_by == "rows":
        return None
    return Mistake(
        field="data.partition_by",
        value=partition_by,
        problem=f"partitions that are dealt by data.stratify = {stratify!r} are equal in rows",
        hint="write partition_by rows, or leave out data.stratify",
    )


_RANGE = ("elastic.min_workers", "elastic.max_workers")
RULES: tuple[Rule, ...] = (
    Rule(("steps", "epochs"), "Exactly one of `steps` and `epochs` is set.", _length),
    Rule(("global_batch", "micro_batch"), "`global_batch` is a multiple of `micro_batch`.", _whole),
    Rule(
        _RANGE,
        "`elastic.min_workers` is at most `elastic.max_workers`.",
        _range,
    ),
    Rule(
        ("elastic.min_workers", "elastic.shares", "global_batch", "micro_batch"),
        "Unless shares are a list, `elastic.min_workers` is at most `global_batch / micro_batch`.",
        _busy,
    ),
    Rule(
        (*_RANGE, "elastic.shares", "global_batch", "micro_batch"),
        "A list in `elastic.shares` has one entry per worker, `elastic.min_workers` and "
        "`elastic.max_workers` are both its length, and it sums to `global_batch / micro_batch`.",
        _fixed,
    ),
    Rule(
        ("data.stratify", "data.partition_by"),
        "With `data.stratify`, `data.partition_by` is rows.",
        _dealt,
    ),
)
