"""BENCHMARKS.md and its charts, from the results alone.

python -m benchmarks.render [--results DIRECTORY] [--out FILE] [--check]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.racing import origins, tables
from benchmarks.racing.chart import Bar, Group, draw
from benchmarks.racing.results import (
    LIMIT,
    ResultsError,
    Row,
    by_contestant,
    few,
    is_ours,
    load_all,
    values,
    with_ratios,
)

RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "BENCHMARKS.md"
PICTURES = ROOT / "docs" / "pictures" / "benchmarks"

_HEAD = """\
# Benchmarks

Written by `python -m benchmarks.render` from the files in `benchmarks/results/`, which
`python -m benchmarks.run` wrote: do not edit it.

Every node is a network namespace of one machine with its own address, a CPU quota that covers its
raylet too, and a limited link; the head and a contestant's driver stand in a namespace of their own
without quota. All contestants train the same model on the same samples in the same order with the
same optimizer. They take turns within a repeat, and a repeat is of one machine, but that raycloud
ran again later in some of the first two, against the limit of before; another repeat may
be of another machine, and of a later commit: the last table names both for every row. raycloud's
micro-batches are of one sample, and were of four before commit e11193b, where three workers could
not share a step evenly.

How to read the tables:

- **samples/s**: of updates that were committed and not lost, over the window, after warm-up: the
  median of the repeats, with the least and the most. A step that an end of the window cuts counts
  by the fraction of its time inside. "(1 of 3)" says of how many repeats a value is, where it is
  not of all.
- **disturbed**: so many of the repeats in which processes outside of the testbed, the harness among
  them, used more than 3% of the machine's CPU time.
- **of the limit**: over what the nodes that are there at the start of the window compute at once
  without any exchange, measured in the same repeat, whatever happens to them in the window.
- **to raycloud's**: its samples/s over raycloud's of the same repeat.
- **s to target**: from the start of the contestant to the target held-out loss.
- **wire bytes per sample**: bytes that all machines, head included, sent per sample, as their
  interfaces count them; these see large segments with one header each, so a real wire carries a few
  percent more.
- **pause after**: per event, the longest gap between commits after it, less one normal step at the
  new capacity. A gap in which two faults fell counts for both; one in which a fault fell does not
  count again for the thaw, mend, return or end of a throttle that follows. "Without end": nothing
  was committed from some second to the end of the window.
- **updates lost**: committed, and taken back by a restart.
- **goodput**: samples that were kept, over what the nodes that were there could compute at each
  second of the window: a node that is gone or frozen nothing, a slowed one in part. Without events
  it is the ratio to the limit, and is left out.
"""


def page(rows: Sequence[Row], pictures: str) -> str:
    """The whole page.

    Args:
        rows: Of all scenarios.
        pictures: Where the charts are, seen from the page.
    """
    parts = [_HEAD]
    rows = with_ratios(rows)
    parts += [f"![{title}]({pictures}/{name}.svg)\n" for name, title in _TITLES.items()]
    for scenario, mine in _by_scenario(rows).items():
        parts += _section(scenario, mine)
    parts += ["## Where each row comes from", ""]
    parts.append("A + after a commit says that the checkout had changes besides it.\n")
    parts += origins.origins(rows)
    return "\n".join(parts) + "\n"


def charts(rows: Sequence[Row]) -> dict[str, str]:
    """Name and text of each chart."""
    scenarios = _by_scenario(with_ratios(rows))
    ratios = [_group(name, mine, _ratio_bar) for name, mine in scenarios.items()]
    times = [_group(name, mine, _time_bar) for name, mine in scenarios.items() if _has_target(mine)]
    return {
        "ratio": draw(_TITLES["ratio"], ratios, axis="of the limit", least_end=1.0),
        "target": draw(_TITLES["target"], times, axis="seconds", least_end=10.0),
    }


_TITLES = {
    "ratio": "Samples per second, over what the nodes of the start compute without exchange",
    "target": "Seconds from the start to the target held-out loss",
}


def _by_scenario(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = sorted({row["scenario"] for row in rows})
    return {name: [row for row in rows if row["scenario"] == name] for name in names}


def _section(scenario: str, rows: Sequence[Row]) -> list[str]:
    bed = rows[-1]["settings_of_testbed"]
    parts = [f"## {scenario}: {bed['title']}", "", *tables.setting(bed), *_training(rows), ""]
    parts += tables.measures(rows)
    if differing := origins.differences(rows):
        parts += ["", "Told together although they differ:", "", *differing]
    if failed := tables.failures(rows):
        parts += ["", "What did not work:", "", *failed]
    return [*parts, ""]


def _training(rows: Sequence[Row]) -> list[str]:
    """What was trained: global batch, target, and the learning rates where they differ."""
    found = []
    targets = {row["settings"]["target_loss"] for row in rows if row["contestant"] != LIMIT}
    if targets - {None}:
        found.append(f"- Target held-out loss: {', '.join(map(str, sorted(targets - {None})))}.")
    rates: dict[float, list[str]] = {}
    for name, theirs in by_contestant(rows).items():
        for rate in sorted({row["settings"]["learning_rate"] for row in theirs}):
            rates.setdefault(rate, []).append(name)
    text = "; ".join(f"{rate:g} ({', '.join(names)})" for rate, names in sorted(rates.items()))
    return [*found, f"- Learning rate: {text}."]


def _has_target(rows: Sequence[Row]) -> bool:
    return any(row["settings"]["target_loss"] is not None for row in rows)


def _group(scenario: str, rows: Sequence[Row], bar: Any) -> Group:
    bars = tuple(bar(name, r) for name, r in by_contestant(rows).items() if name != LIMIT)
    return Group(heading=f"{scenario}: {rows[-1]['settings_of_testbed']['title']}", bars=bars)


def _ratio_bar(name: str, rows: Sequence[Row]) -> Bar:
    found = list(values(rows, "ratio_to_limit").values())
    if not found:
        return Bar(name=name, value=None, words=_why_none(rows))
    return _bar(name, found, f"{median(found):.3f}{few(len(found), len(rows))}")


def _time_bar(name: str, rows: Sequence[Row]) -> Bar:
    found = list(values(rows, "time_to_target_s").values())
    if not found:
        failed = any(row.get("failed") for row in rows)
        return Bar(name=name, value=None, words=_why_none(rows) if failed else "not reached")
    return _bar(name, found, f"{median(found):.0f} s{few(len(found), len(rows))}")


def _bar(name: str, found: Sequence[float], words: str) -> Bar:
    return Bar(
        name=name,
        value=median(found),
        low=min(found),
        high=max(found),
        words=words,
        ours=is_ours(name),
    )


def _why_none(rows: Sequence[Row]) -> str:
    return "failed" if any(row.get("failed") for row in rows) else "not measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the charts; 2 where a file cannot be read, or there is no row.

    Or say which of them are not those of the results: 1 where one is not.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--out", type=Path, default=OUT, help="the page")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="directory of the charts")
    parser.add_argument("--check", action="store_true", help="write nothing: are they these?")
    asked = parser.parse_args(arguments)
    try:
        rows = load_all(asked.results)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    if not rows:
        print(f"{asked.results}: no rows; benchmarks.run writes them there", file=sys.stderr)
        return 2
    where = Path(os.path.relpath(asked.pictures.resolve(), asked.out.resolve().parent)).as_posix()
    written = {asked.out: page(rows, where)}
    written |= {asked.pictures / f"{name}.svg": svg for name, svg in charts(rows).items()}
    if asked.check:
        old = [path for path, text in written.items() if _text(path) != text]
        for path in old:
            print(f"{path} is older than its rows: python -m benchmarks.render", file=sys.stderr)
        return 1 if old else 0
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
