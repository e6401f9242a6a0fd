"""From a source to the list of blocks to make: which inputs, in which pieces, under which keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raycloud.data.digest import combined, inputs_of, table_digest
from raycloud.data.formats import Slice
from raycloud.data.index import Input
from raycloud.data.location import locate
from raycloud.data.recipe import Recipe, Work, key_of
from raycloud.data.slices import cut
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache

_SLICE_BYTES = 32 * 2**20
_PART_ROWS = 65536  # that are digested at a time: how a table is chunked must not matter

Planned = tuple[tuple[Input, ...], tuple[Work, ...]]


def plan_work(
    recipe: Recipe, cache: BlockCache, clock: Clock, known: Sequence[Input] = ()
) -> Planned:
    """Find the files, digest them, and cut them into works, in the order of their rows.

    Args:
        recipe: Of the split.
        cache: Remembers digests of local files.
        clock: To tell files that may still be written to.
        known: Inputs that a run has already, with their versions. They keep their place; new ones
            follow, with the next version. Where nothing is new, the inputs are `known`.

    Raises:
        DataError: Nothing is there, or a known input is gone or has changed.
    """
    found = inputs_of(recipe.source, locate(recipe.source), cache.root, clock)
    inputs = _placed(found, known)
    works = []
    for version in sorted({one.version for one in inputs}):
        of_version = [one for one in inputs if one.version == version]
        works += [
            Work(slice=piece, key=key_of(recipe, piece)) for piece in cut(recipe.source, of_version)
        ]
    return inputs, tuple(works)


def plan_table(recipe: Recipe, dataset: Any, known: Sequence[Input] = ()) -> Planned:
    """The same for rows in hand: a `pyarrow.Table` or a Hugging Face `datasets.Dataset`.

    Each work carries its rows (of about 32 MB).

    Raises:
        DataError: It is something else, has no rows, or is not what `known` says.
    """
    table = _tabular(dataset)
    source = recipe.source
    if not table.rows:
        raise DataError(
            "the data set has no rows: Source.dataset is empty",
            hint="give one with rows, or name files in Source.path",
        )
    digest = combined("key", source.key) if source.key is not None else table.digest()
    name = source.key or "Source.dataset"
    inputs = _placed([Input(path=name, bytes=table.bytes, digest=digest)], known)
    size = max(1, _SLICE_BYTES * table.rows // max(1, table.bytes))
    works = []
    for start in range(0, table.rows, size):
        stop = min(start + size, table.rows)
        piece = Slice(inputs=inputs, format="table", start=start, stop=stop)
        rows = table.rows_between(start, stop)
        if source.columns is not None:
            rows = _chosen(rows, source.columns)
        works.append(Work(slice=piece, key=key_of(recipe, piece), table=rows))
    return inputs, tuple(works)


def compacted(table: pa.Table) -> pa.Table:
    """The same rows without the rest of what they are a view of, which would be pickled too."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _placed(found: Sequence[Input], known: Sequence[Input]) -> tuple[Input, ...]:
    """Known inputs in their places, then new ones in the order of their paths."""
    by_path = {one.path: one for one in found}
    for one in known:
        now = by_path.pop(one.path, None)
        if now is None or (now.bytes, now.digest) != (one.bytes, one.digest):
            what = "is gone" if now is None else "has changed"
            raise DataError(
                f"{one.path} {what} since this run read it",
                hint="put the file back as it was, or start a new run: without --resume, in "
                "another --run-dir. Files may be added to a run's data, not taken away",
            )
    fresh = {one.path: one.modified_ns for one in found}
    kept = (replace(one, modified_ns=fresh[one.path]) for one in known)
    version = max((one.version for one in known), default=-1) + 1
    new = sorted(by_path.values(), key=lambda one: one.path)
    return (*kept, *(replace(one, version=version) for one in new))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tabular:
    rows: int
    bytes: int
    digest: Callable[[], str]
    rows_between: Callable[[int, int], pa.Table]


def _tabular(dataset: Any) -> _Tabular:
    if isinstance(dataset, pa.Table):
        return _Tabular(
            rows=len(dataset),
            bytes=dataset.nbytes,
            digest=lambda: table_digest(_in_parts(dataset.slice, len(dataset))),
            rows_between=lambda start, stop: dataset.slice(start, stop - start),
        )
    if hasattr(dataset, "with_format") and hasattr(dataset, "num_rows"):  # Hugging Face
        view = dataset.with_format("arrow")  # with its own order and choice of rows
        return _Tabular(
            rows=view.num_rows,
            bytes=view.data.nbytes * view.num_rows // max(1, view.data.num_rows),
            digest=lambda: table_digest(
                _in_parts(lambda start, rows: view[start : start + rows], view.num_rows)
            ),
            rows_between=lambda start, stop: view[start:stop],
        )
    raise DataError(
        f"Source.dataset is a {type(dataset).__name__}, which is not known here",
        hint="give a pyarrow.Table, a datasets.Dataset (not a streamed one) or a ray.data.Dataset",
    )


def _in_parts(take: Callable[[int, int], pa.Table], rows: int) -> Iterator[pa.Table]:
    for start in range(0, rows, _PART_ROWS):
        yield take(start, min(_PART_ROWS, rows - start))


def _chosen(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise DataError(
            f"Source.columns names {missing[0]!r}, which Source.dataset does not have",
            hint=f"it has {', '.join(table.column_names)}",
        )
    return table.select(list(columns))
