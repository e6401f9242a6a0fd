"""Where rows come from, and what rows that are told together do not share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.racing.results import Row, by_contestant, disturbed, machine_use
from benchmarks.racing.tables import bed_in_words, table

_SHORT = 8  # characters of a commit
_OF_MACHINE = ("cpu", "cores", "python", "torch", "ray")


def origins(rows: Sequence[Row]) -> list[str]:
    """Commit, versions and machine of every row, and the machines."""
    machines: list[str] = []
    lines = []
    for row in rows:
        machine = _machine(row["machine"])
        if machine not in machines:
            machines.append(machine)
        used = machine_use(row)
        lines.append(
            [
                *(row["scenario"], row["contestant"], str(row["repeat"])),
                (row.get("commit") or "unknown")[:12] + ("+" if row.get("changed") else ""),
                _versions(row),
                f"M{machines.index(machine) + 1}",
                row.get("congestion_control") or "-",
                f"{row['load_before']:.1f}",
                _percent(used.get("steal")),
                _percent(used.get("outside")) + (" disturbed" if disturbed(row) else ""),
            ]
        )
    header = ["scenario", "contestant", "repeat", "commit", "versions", "machine", "TCP"]
    header += ["load before", "stolen", "used by others"]
    named = [f"- M{i}: {machine}" for i, machine in enumerate(machines, 1)]
    return [*named, "", *table(header, lines)]


def differences(rows: Sequence[Row]) -> list[str]:
    """What the repeats of one contestant do not share, one line each.

    Args:
        rows: Of one scenario.
    """
    found = []
    for name, theirs in by_contestant(rows).items():
        sides = [_circumstances(row) for row in theirs]
        for what in dict.fromkeys(key for side in sides for key in side):
            repeats: dict[str, list[int]] = {}
            for row, side in zip(theirs, sides, strict=True):
                repeats.setdefault(side.get(what, "unknown"), []).append(row["repeat"])
            if len(repeats) > 1:
                said = "; ".join(f"{_which(which)} {value}" for value, which in repeats.items())
                found.append(f"- {name}, {what}: {said}.")
    return found


def _circumstances(row: Row) -> dict[str, str]:
    """All under which a row was measured, by name."""
    machine = row.get("machine") or {}
    return {
        "commit": (row.get("commit") or "unknown")[:_SHORT],
        "versions": _versions(row),
        "TCP": row.get("congestion_control") or "unknown",
        **{name.replace("_", " "): str(value) for name, value in row["settings"].items()},
        **{f"the machine's {name}": str(machine.get(name, "unknown")) for name in _OF_MACHINE},
        **bed_in_words(row["settings_of_testbed"]),
    }


def _which(repeats: Sequence[int]) -> str:
    return f"repeat{'s' if len(repeats) > 1 else ''} {', '.join(map(str, repeats))}"


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {v}" for name, v in sorted((row.get("versions") or {}).items()))


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}"
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
