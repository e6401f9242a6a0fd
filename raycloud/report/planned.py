"""A plan as plain lines, for the dry run. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import byte_count, figure, printable_line

if TYPE_CHECKING:
    from raycloud.planning import Plan


def plan_text(plan: Plan) -> str:
    """Members with their shares, and what a step is expected to take."""
    head = (
        f"{plan.job}: {len(plan.members)} member(s), {plan.global_batch} samples per step in "
        f"{plan.micro_batches} micro-batches, {plan.steps_per_epoch} steps per epoch, "
        f"{plan.parameters:,} parameters ({byte_count(plan.state_bytes)} of state)"
    )
    tables = [_table(plan.member_rows()), _table(plan.prediction_rows())]
    return "\n\n".join([printable_line(head), *tables])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]
    right = [not isinstance(rows[0][name], str) for name in names]
    lines = []
    for row in [names, *cells]:
        padded = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        lines.append(("  " + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return printable_line(value) if isinstance(value, str) else figure(value)
