"""Rows as tables of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.racing.results import LIMIT, OURS, Row, by_contestant, paired, spread, values

_GIGA, _MEGA = 1e9, 1e6


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    return [
        f"| {' | '.join(header)} |",
        f"|{'|'.join('---' for _ in header)}|",
        *(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines),
    ]


def setting(bed: Mapping[str, Any]) -> list[str]:
    """What a scenario is, as a list, from what its rows say of the testbed."""
    found = [f"- Nodes: {'; '.join(_node(node) for node in bed['nodes'])}."]
    if later := bed.get("later"):
        found.append(f"- Nodes that come: {'; '.join(_node(node) for node in later)}.")
    found += [
        f"- Between zones {' and '.join(trunk['zones'])}: {_rate(trunk['rate_bits_per_s'])} each"
        f" way, {trunk['delay_s'] * 1e3:g} ms one way."
        for trunk in bed["trunks"]
    ]
    events = [f"{event['at_s']:g} s {event['what']}" for event in bed["events"]]
    found.append(f"- Window: {bed['window_s']:g} s; {'; '.join(events) if events else 'no event'}.")
    return [*found, *(f"- {note}" for note in bed["notes"])]


def measures(rows: Sequence[Row]) -> list[str]:
    """The table of one scenario: one line per contestant."""
    faults = any(row.get("faults") for row in rows)
    columns = [*_COLUMNS, *(_FAULT_COLUMNS if faults else {}).items()]
    ours = values(by_contestant(rows).get(OURS, []), "samples_per_s")
    lines = [
        [name, str(len(theirs)), *(read(theirs, ours) for _, read in columns)]
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
                found.append(f"- {where} failed: {_cell(row['failed'])}")
            found += [f"- {where}, not done: {what}." for what in row.get("not_done") or ()]
            found += [
                f"- {where}, after {fault['at_s']:g} s {fault['what']}: "
                f"{fault['no_pause_because']}."
                for fault in row.get("faults") or ()
                if fault.get("no_pause_because") and not row.get("failed")
            ]
    return found


def origins(rows: Sequence[Row]) -> list[str]:
    """Commit, versions and machine of every row, and the machines."""
    machines: list[str] = []
    lines = []
    for row in rows:
        machine = _machine(row["machine"])
        if machine not in machines:
            machines.append(machine)
        steal = row.get("steal") or {}
        lines.append(
            [
                *(row["scenario"], row["contestant"], str(row["repeat"])),
                (row.get("commit") or "unknown")[:12] + ("+" if row.get("changed") else ""),
                ", ".join(f"{k} {v}" for k, v in sorted((row.get("versions") or {}).items())),
                f"M{machines.index(machine) + 1}",
                f"{row['load_before']:.1f}",
                _percent(steal.get("steal")),
                _percent(steal.get("outside")),
            ]
        )
    header = ["scenario", "contestant", "repeat", "commit", "versions", "machine"]
    header += ["load before", "stolen", "used by others"]
    named = [f"- M{i}: {machine}" for i, machine in enumerate(machines, 1)]
    return [*named, "", *table(header, lines)]


def time_to_target(theirs: Sequence[Row], ours: Mapping[int, float] | None = None) -> str:  # noqa: ARG001
    """Seconds, and in how many of the runs that had a target it was reached."""
    asked = [row for row in theirs if (row.get("settings") or {}).get("target_loss") is not None]
    reached = list(values(theirs, "time_to_target_s").values())
    if not asked or theirs[0]["contestant"] == LIMIT:
        return "-"
    if not reached:
        return "not reached"
    return spread(reached) + (
        f" ({len(reached)} of {len(asked)})" if len(reached) < len(asked) else ""
    )


def _measure(name: str, digits: int) -> Callable[[Sequence[Row], Mapping[int, float]], str]:
    return lambda theirs, _: spread(list(values(theirs, name).values()), digits)


def _to_ours(theirs: Sequence[Row], ours: Mapping[int, float]) -> str:
    return spread(paired(values(theirs, "samples_per_s"), ours), 2)


def _wire(theirs: Sequence[Row], _: Mapping[int, float]) -> str:
    return spread([v / 1e3 for v in values(theirs, "wire_bytes").values()], 1)


def _pauses(theirs: Sequence[Row], _: Mapping[int, float]) -> str:
    """Median and longest of all faults of all repeats, and how many were never got over."""
    all_of_them = [pause for row in theirs for pause in row.get("pauses_s") or ()]
    known = [pause for pause in all_of_them if pause is not None]
    never = len(all_of_them) - len(known)
    text = f"{median(known):.1f}, at most {max(known):.1f}" if known else "-"
    return text + (f"; {never} without end" if never else "")


_COLUMNS = (
    ("samples/s", _measure("samples_per_s", 1)),
    ("of the limit", _measure("ratio_to_limit", 3)),
    ("to raycloud's", _to_ours),
    ("s to target", time_to_target),
    ("kB sent per sample", _wire),
    ("s to first step", _measure("first_step_s", 1)),
)
_FAULT_COLUMNS = {
    "pause s": _pauses,
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


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}"
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
