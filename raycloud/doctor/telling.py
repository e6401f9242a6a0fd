"""Findings as people and scripts read them. Prints nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raycloud.doctor.finding import Finding, Level, exit_code
from raycloud.redact import redact

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts

FORMAT = 1

Paint = Callable[[Level, str], str]


def as_text(facts: Facts, findings: Sequence[Finding], paint: Paint) -> str:
    """What was found, the worst first, each with its remedy; then what is well; then a count.

    Args:
        facts: What was looked at.
        findings: As `examine` gives them.
        paint: Colours a level's word, or leaves it as it is.
    """
    alike = dict[str, list[Finding]]()
    for finding in findings:
        if finding.level is not Level.WELL:
            alike.setdefault(finding.name, []).append(finding)
    blocks = [_block(group, paint) for group in alike.values()]
    fine = [_well(finding, paint) for finding in findings if finding.level is Level.WELL]
    parts = ["\n\n".join(blocks), "\n".join(fine), _end(facts, findings)]
    return "\n\n".join(part for part in parts if part)


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """The same for scripts: a JSON object with a format number, without secrets."""
    cluster = facts.cluster
    record = {
        "format": FORMAT,
        "exit_code": exit_code(findings),
        "address": cluster.address if cluster else None,
        "findings": [
            {
                "name": finding.name,
                "level": finding.level.word,
                "where": finding.where,
                "value": finding.value,
                "what": finding.what,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }
    return json.dumps(redact(record), indent=2, allow_nan=False)


def _block(alike: Sequence[Finding], paint: Paint) -> str:
    """Findings of one kind: what is the matter, where, and what would do."""
    first = alike[0]
    lines = [f"{paint(first.level, first.level.word)}  {first.name}: {first.what}"]
    lines += [f"        {_printable(f'{finding.where}: {finding.value}')}" for finding in alike]
    return "\n".join([*lines, f"        remedy: {first.remedy}"])


def _well(finding: Finding, paint: Paint) -> str:
    value = _printable(f"{finding.where}: {finding.value}")
    return f"{paint(finding.level, 'well')}  {finding.name}  {value}"


def _end(facts: Facts, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    parts = [f"{counts[level]} {level.word}" for level in reversed(Level) if level in counts]
    looked = "this machine"
    if facts.cluster:
        nodes = len(facts.cluster.nodes)
        looked += f" and the cluster at {facts.cluster.address} ({nodes} node(s))"
    return f"{looked}: {', '.join(parts) or 'nothing found'}"


def _printable(text: str) -> str:
    """On one line, without control characters: a terminal would obey them."""
    return "".join(char if char.isprintable() else "?" for char in text)
