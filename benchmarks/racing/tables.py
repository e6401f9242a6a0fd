"""Rows as tables of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.racing.results import (
    LIMIT,
    OURS,
    Row,
    by_contestant,
    disturbed,
    few,
    paired,
    spread,
    values,
)

_GIGA, _MEGA = 1e9, 1e6


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown; a new line within a cell stays one."""
    return [
        f"| {' | '.join(header)} |",
        f"|{'|'.join('---' for _ in header)}|",
        *(f"| {' | '.join(_lines(text) for text in line)} |" for line in lines),
    ]


def setting(bed: Mapping[str, Any]) -> list[str]:
    """What a scenario is, as a list, from what its rows say of the testbed."""
    said = bed_in_words(bed)
    found = [f"- Nodes: {said['nodes']}."]
    if bed.get("later"):
        found.append(f"- Nodes that come: {said['nodes that come']}.")
    found += [f"- Between zones {_trunk(trunk)}." for trunk in bed["trunks"]]
    found.append(f"- Window: {said['window']}; {said['events']}.")
    return [*found, *(f"- {note}" for note in bed["notes"])]


def bed_in_words(bed: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a testbed by their names."""
    events = [f"{event['at_s']:g} s {event['what']}" for event in bed["events"]]
    return {
        "nodes": "; ".join(map(_node, bed["nodes"])),
        "nodes that come": "; ".join(map(_node, bed.get("later") or ())) or "none",
        "trunks": "; ".join(map(_trunk, bed["trunks"])) or "none",
        "window": f"{bed['window_s']:g} s",
        "events": "; ".join(events) or "no event",
        "time limit": f"{bed['limit_s']:g} s",
    }


def measures(rows: Sequence[Row]) -> list[str]:
    """The table of one scenario: one line per contestant."""
    faults = any(row.get("faults") for row in rows)
    trunks = any(row.get("trunk_bytes") for row in rows)
    more = (_TRUNK_COLUMNS if trunks else {}) | (_FAULT_COLUMNS if faults else {})
    columns = [*_COLUMNS, *more.items()]
    ours = values(by_contestant(rows).get(OURS, []), "samples_per_s")
    lines = [
        [name, _repeats(theirs), *(read(theirs, ours) for _, read in columns)]
        for name, theirs in by_contestant(rows).items()
    ]
    return table(["contestant", "repeats", *(name for name, _ in columns)], lines)


def failures(rows: Sequence[Row]) -> list[str]:
    """What did not work, one line each."""
    found = []
    for name, theirs in by_contestant(rows).items():
        for row in theirs:
            where = f"{name}, repeat {row['repeat']}"
            if row.get("failed"):
                found.append(f"- {where} failed: {in_cell(row['failed'])}")
            found += [f"- {where}, not done: {what}." for what in row.get("not_done") or ()]
            found += [
                f"- {where}, after {fault['at_s']:g} s {fault['what']}: "
                f"{fault['no_pause_because']}."
                for fault in row.get("faults") or ()
                if fault.get("no_pause_because") and not row.get("failed")
            ]
    return found


def time_to_target(theirs: Sequence[Row], _: Mapping[int, float] | None = None) -> str:
    """Seconds, and in how many of the runs that had a target it was reached."""
    asked = [row for row in theirs if (row.get("settings") or {}).get("target_loss") is not None]
    reached = list(values(theirs, "time_to_target_s").values())
    if not asked or theirs[0]["contestant"] == LIMIT:
        return "-"
    if not reached:
        return "not reached"
    return spread(reached) + few(len(reached), len(asked))


def _measure(name: str, digits: int) -> Callable[[Sequence[Row], Mapping[int, float]], str]:
    return lambda theirs, _: _pooled(list(values(theirs, name).values()), theirs, digits)


def _pooled(found: Sequence[float], theirs: Sequence[Row], digits: int) -> str:
    """Their spread, and of how many repeats it is where it is not of all."""
    return spread(found, digits) + few(len(found), len(theirs))


def _repeats(theirs: Sequence[Row]) -> str:
    """How many, and how many of them others have disturbed."""
    count = sum(map(disturbed, theirs))
    if len(theirs) == count == 1:
        return "1 (disturbed)"
    return f"{len(theirs)}" + (f" ({count} disturbed)" if count else "")


def _to_ours(theirs: Sequence[Row], ours: Mapping[int, float]) -> str:
    return _pooled(paired(values(theirs, "samples_per_s"), ours), theirs, 2)


def _pauses(theirs: Sequence[Row], _: Mapping[int, float]) -> str:
    """One line per event: its pause, and in how many of the repeats in which it happened."""
    found: dict[tuple[str, int], list[tuple[float, float | None]]] = {}
    for row in theirs:
        before: Counter[str] = Counter()  # the same may happen several times
        for fault, pause in zip(row.get("faults") or (), row.get("pauses_s") or (), strict=True):
            what = fault["what"]
            found.setdefault((what, before[what]), []).append((fault["at_s"], pause))
            before[what] += 1
    in_time = sorted(found.items(), key=lambda one: median(at_s for at_s, _ in one[1]))
    return "\n".join(f"{what}: {_pause(pauses)}" for (what, _), pauses in in_time) or "-"


def _pause(pauses: Sequence[tuple[float, float | None]]) -> str:
    known = [pause_s for _, pause_s in pauses if pause_s is not None]
    return f"{spread(known)} s{few(len(known), len(pauses))}" if known else "without end"


_COLUMNS = (
    ("samples/s", _measure("samples_per_s", 1)),
    ("of the limit", _measure("ratio_to_limit", 3)),
    ("to raycloud's", _to_ours),
    ("s to target", time_to_target),
    ("wire bytes per sample", _measure("wire_bytes", 0)),
    ("s to first step", _measure("first_step_s", 1)),
)
_TRUNK_COLUMNS = {"bytes between zones per sample": _measure("trunk_bytes", 0)}
_FAULT_COLUMNS = {
    "pause after": _pauses,
    "updates lost": _measure("lost_steps", 0),
    "goodput": _measure("goodput", 3),
}


def _node(node: Mapping[str, Any]) -> str:
    cores = "no quota" if node["cores"] is None else f"{node['cores']:g} cores"
    rates = {node["egress_bits_per_s"], node["ingress_bits_per_s"]}
    link = (
        f"{_rate(node['egress_bits_per_s'])} each way"
        if len(rates) == 1
        else f"{_rate(node['egress_bits_per_s'])} out, {_rate(node['ingress_bits_per_s'])} in"
    )
    delay = f", {node['delay_s'] * 1e3:g} ms one way" if node["delay_s"] else ""
    spot = ", spot" if node["spot"] else ""
    return f"{node['name']} {cores}, {link}{delay}, zone {node['zone']}{spot}"


def _trunk(trunk: Mapping[str, Any]) -> str:
    rate, delay_s = _rate(trunk["rate_bits_per_s"]), trunk["delay_s"]
    return f"{' and '.join(trunk['zones'])}: {rate} each way, {delay_s * 1e3:g} ms one way"


def _rate(bits_per_s: float | None) -> str:
    """In the unit people say it in.

    >>> _rate(2e7), _rate(1e9), _rate(None)
    ('20 Mbit/s', '1 Gbit/s', 'no limit')
    """
    if bits_per_s is None:
        return "no limit"
    if bits_per_s >= _GIGA:
        return f"{bits_per_s / _GIGA:g} Gbit/s"
    return f"{bits_per_s / _MEGA:g} Mbit/s"


def in_cell(text: str) -> str:
    """Text that is one line of Markdown, whatever it holds."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _lines(text: str) -> str:
    return "<br>".join(map(in_cell, text.split("\n")))
