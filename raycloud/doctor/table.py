"""All checks, in the order in which they are told, and the table of what they can find."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.doctor import access, cluster, hardware, software

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts
    from raycloud.doctor.finding import Check, Finding

CHECKS: tuple[Check, ...] = (
    *software.CHECKS,
    *access.CHECKS,
    *hardware.CHECKS,
    *cluster.CHECKS,
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """What the checks say of the facts: the worst first, otherwise in the order of the table."""
    found = [finding for check in CHECKS for finding in check.look(facts)]
    return tuple(sorted(found, key=lambda finding: -finding.level.rank))


def render_checks() -> str:
    """The checks as a Markdown table, for the documentation."""
    rows = ["| check | what it asks | what it can find |", "|---|---|---|"]
    rows += [
        f"| `{check.name}` | {check.asks} | {', '.join(f'`{kind.name}`' for kind in check.kinds)} |"
        for check in CHECKS
    ]
    return "\n".join(rows) + "\n"


def render_kinds() -> str:
    """Each kind of finding with its remedy as a Markdown table, for the documentation."""
    rows = ["| finding | level | what is the matter | remedy |", "|---|---|---|---|"]
    rows += [
        f"| `{kind.name}` | {kind.level.word} | {kind.what} | {kind.remedy} |"
        for check in CHECKS
        for kind in check.kinds
    ]
    return "\n".join(rows) + "\n"
