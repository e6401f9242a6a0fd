"""`jobs/clicks.py` on tiny data: the split, rows, batches, metrics, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from raycloud import Splits
from raycloud.errors import DataError
from raycloud.rows import Rows
from raycloud.task import Source
from tests.jobs import measured, module_of, rng, task_of, updates

LABEL = "MadePurchase"


def sessions(count: int, buyers: int) -> pa.Table:
    """Sessions as text; the first `buyers` of them bought, after a page of value."""
    clicks, draw = module_of(task_of("clicks")), rng()
    bought = np.arange(count) < buyers
    columns: dict[str, Any] = {
        name: [str(v) for v in draw.integers(0, 60, count)] for name in clicks.NUMBERS
    }
    columns["AvgPageValue"] = [str(v) for v in np.where(bought, 50, 0)]
    for name, known in clicks.CATEGORIES.items():
        columns[name] = [known[i] for i in draw.integers(0, len(known), count)]
    return pa.table(columns | {LABEL: ["TRUE" if b else "FALSE" for b in bought]})


def write(table: pa.Table, file: Path) -> str:
    pyarrow.csv.write_csv(table, file)
    return str(file)


def converted(source: Source) -> Rows:
    """The rows as the pipeline hands them to `preprocess`."""
    columns = {
        name: source.dataset[name].cast((source.types or {}).get(name, "string"))
        for name in source.dataset.column_names
    }
    return Rows.from_table(pa.table(columns))


def tables(splits: Splits) -> tuple[pa.Table, pa.Table]:
    assert isinstance(splits.train, Source)
    assert isinstance(splits.held_out, Source)
    return splits.train.dataset, splits.held_out.dataset


def test_clicks_holds_out_a_fifth_of_each_class(tmp_path: Path) -> None:
    table = sessions(205, 31)
    train, held_out = tables(task_of("clicks").data(write(table, tmp_path / "a.csv")))
    assert held_out[LABEL].to_pylist().count("TRUE") == round(31 / 5)
    assert held_out[LABEL].to_pylist().count("FALSE") == round(174 / 5)
    every = train.to_pylist() + held_out.to_pylist()
    assert sorted(map(str, every)) == sorted(map(str, table.to_pylist()))


def test_clicks_holds_out_the_smallest_digests_of_a_class() -> None:
    held_out = module_of(task_of("clicks")).held_out
    labels = ["no", "no", "yes", None, "yes"]
    assert held_out(labels, [b"d", b"a", b"c", b"b", b"e"], 0.5).tolist() == [0, 1, 1, 0, 0]


def test_clicks_splits_by_what_a_session_is_not_where_it_stands(tmp_path: Path) -> None:
    table = sessions(100, 20)
    _, first = tables(task_of("clicks").data(write(table, tmp_path / "a.csv")))
    turned = table.take(list(range(100))[::-1])
    _, second = tables(task_of("clicks").data(write(turned, tmp_path / "b.csv")))
    assert second.to_pylist() == first.to_pylist()[::-1]


def test_clicks_knows_its_sessions_by_content(tmp_path: Path) -> None:
    def keys(count: int, folder: str) -> list[Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        file = write(sessions(count, 9), tmp_path / folder / "sessions.csv")
        splits = task_of("clicks").data(file)
        return [splits.train.key, splits.held_out.key]

    assert keys(50, "a") == keys(50, "b")
    assert len({*keys(50, "a"), *keys(60, "c")}) == 4


def test_clicks_reads_missing_values_as_such(tmp_path: Path) -> None:
    columns = sessions(3, 1).to_pydict()
    columns["AvgPageValue"] = ["", "NA", "-1"]
    columns["VisitMonth"] = ["", "Nov", "Brumaire"]
    columns[LABEL] = ["TRUE", "FALSE", ""]
    file = tmp_path / "a.csv"
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    file.write_text("\n".join(lines))
    splits = task_of("clicks").data(str(file))
    train, _ = tables(splits)
    assert LABEL in splits.train.required
    assert train[LABEL].null_count == 1  # named by the pipeline as a bad row

    clicks = module_of(task_of("clicks"))
    labelled = Source(dataset=train.slice(0, 2), types=splits.train.types)
    made = task_of("clicks").preprocess(converted(labelled))
    value = list(clicks.NUMBERS).index("AvgPageValue")
    assert made["numbers"][:, value].tolist() == [0, 0]
    assert made["numbers"][:, len(clicks.NUMBERS) + value].tolist() == [1, 1]
    assert made["categories"][:, 0].tolist() == [0, 11]
    assert made[LABEL].tolist() == [1, 0]


def test_clicks_makes_the_same_of_a_row_whatever_its_neighbours(tmp_path: Path) -> None:
    task = task_of("clicks")
    rows = converted(task.data(write(sessions(40, 8), tmp_path / "a.csv")).train)
    whole = task.preprocess(rows)
    parts = [task.preprocess(rows[a:b]) for a, b in ((0, 1), (1, 20), (20, len(rows)))]
    for name, column in whole.items():
        assert np.array_equal(column, np.concatenate([p[name] for p in parts]))
    assert np.isfinite(whole["numbers"]).all()
    assert abs(whole["numbers"]).max() < 100


def test_clicks_learns_what_sells(tmp_path: Path) -> None:
    task = task_of("clicks")
    rows = converted(task.data(write(sessions(100, 30), tmp_path / "a.csv")).train)
    batch = task.batch(Rows(task.preprocess(rows)), None)
    assert batch["numbers"].shape == (80, 20)
    assert batch["categories"].shape == (80, 7)
    assert int(batch["bought"].sum()) == 24
    losses = updates(task, batch, 200)
    assert losses[-1] < 0.3 * losses[0]
    metrics = measured(task, batch, 80)
    assert 0 <= metrics["auc"] <= 1
    assert metrics["loss"] == pytest.approx(np.log(2), abs=0.2)


def test_clicks_says_what_data_it_needs() -> None:
    with pytest.raises(DataError, match="clicks has no sessions of its own") as refused:
        task_of("clicks").data(None)
    for part in ("--set data.path=", "CSV", "VisitMonth", LABEL, "UCI"):
        assert part in refused.value.hint


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(None, "No such file", id="absent"),
        pytest.param("a,b\n1,2\n", "AcctPagesViewed", id="other columns"),
        pytest.param("", "[Ee]mpty", id="empty"),
    ],
)
def test_clicks_refuses_what_is_not_its_file(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "a.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=why) as refused:
        task_of("clicks").data(str(file))
    assert str(file) in str(refused.value)
    assert LABEL in refused.value.hint
