"""Epochs of decoded images: raycloud against its peers, and cached against not cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.feeding.contestants import (
    BATCHED,
    FEEDERS,
    OURS,
    OWN,
    SAME,
    Missing,
    deliver,
    interpreters,
)
from benchmarks.feeding.floors import Verdict, ratio
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.machine import load
from benchmarks.processes import CommandFailedError
from benchmarks.throughput import turns

COLD, WARM, AGAIN, NOT_CACHED = "cold", "warm", "second run", "not cached"
WARM_EPOCHS = 3

Row = dict[str, Any]


def measure(setting: Setting) -> Outcome:
    """Have all feeders deliver the images, in turn, and compare them."""
    pythons, missing = interpreters(setting.environments)
    rows: list[Row] = []
    for repeat, name in turns(tuple(pythons), setting.repeats):
        load_before = load()
        try:
            found = deliver(name, pythons[name], setting.images, warm=WARM_EPOCHS)
        except CommandFailedError as error:
            if name == OURS:
                raise
            missing.append(Missing(name=name, why=f"failed in repeat {repeat}: {error}"))
            setting.say(f"repeat {repeat}  {name}: failed")
            continue
        rows.append({"feeder": name, "repeat": repeat, "load_before": load_before, **found})
        setting.say(f"repeat {repeat}  {name:<28} {_brief(rows[-1])}")
    return Outcome(
        record={"rows": rows, "missing": [asdict(one) for one in missing], "rates": rates(rows)},
        text=table(rates(rows), missing),
        verdicts=verdicts(rows),
    )


def rate(row: Row, kind: str, *, shuffled: bool) -> float | None:
    """Images a second in the median epoch of a kind; None where the feeder has none."""
    walls_s = [
        epoch["wall_s"]
        for epoch in row["epochs"]
        if (epoch["kind"], epoch["shuffled"]) == (kind, shuffled)
    ]
    if not walls_s:
        return None
    rows: int = row["epochs"][0]["sums"]["rows"]
    return rows / median(walls_s)


def rates(rows: Sequence[Row]) -> list[Row]:
    """Each feeder's rates, one per repeat, by kind of epoch."""
    found: dict[tuple[str, str, bool], dict[int, float]] = {}
    for row in rows:
        for kind in (COLD, WARM, AGAIN, NOT_CACHED):
            for shuffled in (True, False):
                one = rate(row, kind, shuffled=shuffled)
                if one is not None:
                    found.setdefault((row["feeder"], kind, shuffled), {})[row["repeat"]] = one
    return [
        {"feeder": feeder, "kind": kind, "shuffled": shuffled, "images_per_s": by_repeat}
        for (feeder, kind, shuffled), by_repeat in found.items()
    ]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """What the floors ask of cold and warm epochs."""
    known = rates(rows)
    cold, warm, again, without = (_ours(known, kind) for kind in (COLD, WARM, AGAIN, NOT_CACHED))

    def against(
        name: str, ours: Mapping[int, float], theirs: Mapping[int, float], floor: float | None
    ) -> list[Verdict]:
        both = sorted(ours.keys() & theirs.keys())
        if not both:
            return []
        mine, others = [ours[r] for r in both], [theirs[r] for r in both]
        return [ratio(name, mine, others, at_least=floor)]

    def best(kind: str, keep: Callable[[Row], bool] = lambda _: True) -> dict[int, float]:
        """By repeat, the fastest of the peers."""
        found: dict[int, float] = {}
        for one in known:
            if one["feeder"] != OURS and one["kind"] == kind and keep(one):
                for repeat, value in one["images_per_s"].items():
                    found[repeat] = max(value, found.get(repeat, 0.0))
        return found

    def among(*decoders: str) -> Callable[[Row], bool]:
        """Whether a feeder has one of these decoders."""
        return lambda one: FEEDERS[one["feeder"]].decoder in decoders

    def shuffled(one: Row) -> bool:
        return bool(one["shuffled"])

    return [
        *against("cold / best peer as documented", cold, best(COLD, among(OWN)), 1.0),
        *against("cold / best peer with our decoder", cold, best(COLD, among(SAME)), 1.0),
        *against("cold / best peer batched by hand", cold, best(COLD, among(BATCHED)), 1.0),
        *against("warm / cold", warm, cold, 4.0),
        *against("warm / best peer, also unshuffled", warm, best(WARM), 1.5),
        *against("warm / best shuffled peer", warm, best(WARM, shuffled), 1.5),
        *against("second run, first epoch / cold", again, cold, None),
        *against("cached / not cached, throughput", warm, without, 1.18),
        *_latency(rows),
    ]


def _ours(known: Sequence[Row], kind: str) -> dict[int, float]:
    for one in known:
        if (one["feeder"], one["kind"]) == (OURS, kind):
            by_repeat: dict[int, float] = one["images_per_s"]
            return by_repeat
    return {}


def _latency(rows: Sequence[Row]) -> list[Verdict]:
    """How long reading a batch takes, cached against not: the papers have 35% less."""
    ours = [row for row in rows if row["feeder"] == OURS and "read_ms" in row]
    found = []
    for figure in ("mean", "p99"):
        cached, without = (
            [row["read_ms"][kind][figure] for row in ours] for kind in (WARM, NOT_CACHED)
        )
        if ours:
            one = ratio(f"cached / not cached, {figure} latency of a batch", cached, without)
            found.append(Verdict(**{**asdict(one), "at_most": 0.65}))
    return found


def table(known: Sequence[Row], missing: Sequence[Missing]) -> str:
    """All rates, for people: the median of the repeats."""
    lines = [f"{'images/s (median of repeats)':<30}{'kind':<14}{'shuffled':<10}{'images/s':>10}"]
    lines += [
        f"{one['feeder']:<30}{one['kind']:<14}{'yes' if one['shuffled'] else 'no':<10}"
        f"{median(one['images_per_s'].values()):>10.0f}"
        for one in sorted(
            known, key=lambda one: (one["kind"], -median(one["images_per_s"].values()))
        )
    ]
    lines += [f"{one.name}: {one.why}" for one in missing]
    return "\n".join(lines)


def _brief(row: Row) -> str:
    told = []
    for kind in (COLD, WARM):
        found = [rate(row, kind, shuffled=shuffled) for shuffled in (True, False)]
        told += [f"{kind} {max(value for value in found if value):8.0f}/s"] if any(found) else []
    return "  ".join(told)
