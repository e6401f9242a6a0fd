"""How far forecasts of loads err, and what shares by them gain, on real traces.

    python -m benchmarks.forecast --data DIRECTORY [--json FILE]

DIRECTORY holds `cluster/gpu_duty_cycle.parquet`, a value a minute of GPUs in production, and
`straggler/job_*_norm.csv`, the mini-batch times of workers of real jobs (Alibaba, clusterdata).
Errors are mean absolute ones over all values, of one step and of five. A gain is the part of the
time with equal shares that is saved: with parts of micro-batches and new shares in every step; and
by the rule of a run, whole micro-batches that move where two looks in a row promise 5%, or as much
as the forecast of the slowest errs. How often they move where nothing happens is counted with noise
of our own: three workers, 500 steps, seconds that scatter evenly on a log scale.
No time is measured here; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyarrow import parquet

from raycloud.planner.expected import ExpectedSpeed
from raycloud.planner.forecast import Forecast, Forecaster, forecasters
from raycloud.planner.shares import better_shares, dead_band, fit_shares
from raycloud.planner.speed import NO_LIMIT, Speed, SpeedEstimate, Speeds

CHOSEN, EXPECTED = "Forecast", "ExpectedSpeed"
JOBS = (1, 2, 4)
AHEADS = (1, 5)
PER_WORKER = (16, 64)  # micro-batches of a step
_LOOKS, GAIN = 2, 0.05  # as a run's
STEP, UNDISTURBED = 40, 500  # micro-batches of a step, and steps, where nothing happens

Values = npt.NDArray[np.float64]


def loads(path: Path) -> list[Values]:
    """A series for each pod, in percent."""
    table = parquet.read_table(path)
    pods, values = table["pod"].to_numpy(), table["duty_cycle"].to_numpy().astype(np.float64)
    return [values[pods == pod] for pod in np.unique(pods)]


def forecasts(make: Callable[[], Any], series: Values, ahead: int) -> Values:
    """Of each value from the second on: what was said `ahead` values before."""
    one, said = make(), []
    for value in series[: len(series) - ahead].tolist():
        one.observe(value)
        said.append(one.forecast(ahead))
    return np.array(said)


def errors(pods: Sequence[Values], aheads: Sequence[int] = AHEADS) -> dict[str, dict[str, float]]:
    """By how many values ahead and by name, the mean absolute error."""
    fixed = len(forecasters())

    def maker(at: int) -> Callable[[], Forecaster | Forecast]:
        return lambda: forecasters()[at] if at < fixed else Forecast()

    found: dict[str, dict[str, float]] = {}
    for ahead in aheads:
        found[str(ahead)] = {}
        for at in range(fixed + 1):
            off = [np.abs(forecasts(maker(at), one, ahead) - one[ahead:]) for one in pods]
            name = CHOSEN if at == fixed else forecasters()[at].name
            found[str(ahead)][name] = float(np.concatenate(off).mean())
    return found


def used(pods: Sequence[Values]) -> dict[str, float]:
    """By name, the part of the values that `Forecast` used it for."""
    counts: dict[str, int] = defaultdict(int)
    for series in pods:
        forecast = Forecast()
        for value in series.tolist():
            forecast.observe(value)
            counts[forecast.name] += 1
    total = sum(counts.values())
    return {name: count / total for name, count in sorted(counts.items())}


def trace(path: Path) -> Values:
    """Mini-batch times of a real job: a row per moment, a column per worker."""
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    with path.open() as lines:
        for line in csv.DictReader(lines):
            rows[int(line["time"])][int(line["worker"])] = float(line["batch_time_norm"])
    workers = max(map(len, rows.values()))
    whole = (row for _, row in sorted(rows.items()) if len(row) == workers)
    return np.array([[row[worker] for worker in sorted(row)] for row in whole])


Follows = Callable[[Speed], SpeedEstimate | ExpectedSpeed]
FOLLOWS: dict[str, Follows] = {"SpeedEstimate": SpeedEstimate, EXPECTED: ExpectedSpeed}


def estimated(seconds: Values, make: Follows) -> tuple[Values, Values]:
    """What is expected of each moment from the second on, by worker, and by what part it errs."""
    estimates = [make(Speed(fixed_s=0.0, micro_batch_s=one)) for one in seconds[0]]
    said, errs = [], []
    for row in seconds[:-1].tolist():
        for estimate, took_s in zip(estimates, row, strict=True):
            estimate.observe(1, 1, took_s)
        said.append([estimate.micro_batch_s for estimate in estimates])
        errs.append([getattr(estimate, "error", 0.0) for estimate in estimates])
    return np.array(said), np.array(errs)


def levels(seconds: Values) -> dict[str, Values]:
    """By name, what is expected of each moment from the second on, by worker."""
    told = np.stack([forecasts(Forecast, column, 1) for column in seconds.T], axis=1)
    return {
        "equal": np.ones_like(told),
        "fit-once": np.broadcast_to(seconds[0], told.shape),
        "lag-1": seconds[:-1],
        **{name: estimated(seconds, make)[0] for name, make in FOLLOWS.items()},
        CHOSEN: told,
        "perfect foresight": seconds[1:],
    }


def levelled(expected: Values) -> Values:
    """Shares, of any size, with which all would end at once; they sum to the workers."""
    per_s = 1.0 / expected
    shares: Values = per_s * (expected.shape[1] / per_s.sum(axis=1, keepdims=True))
    return shares


def fractional(seconds: Values, expected: Mapping[str, Values]) -> dict[str, float]:
    """By name, the part of the time with equal shares that these shares save."""
    equal_s = seconds[1:].max(axis=1).sum()
    return {
        name: 1.0 - float((levelled(said) * seconds[1:]).max(axis=1).sum() / equal_s)
        for name, said in expected.items()
    }


def by_rule(
    seconds: Values, expected: Values, per_worker: int, errs: Values | None = None
) -> dict[str, float]:
    """The same with whole micro-batches and the rule of a run, and how often shares change."""
    members = seconds.shape[1]
    limit, none_s = np.full(members, NO_LIMIT, np.int64), np.zeros(members)
    total, worth, changes, took_s = members * per_worker, 0, 0, 0.0
    shares = fit_shares(Speeds(none_s, seconds[0], limit), total)
    for at, (said, row) in enumerate(zip(expected, seconds[1:], strict=True)):
        slowest = int((np.array(shares) * said).argmax())
        gain = dead_band(GAIN, 0.0 if errs is None else float(errs[at][slowest]))
        better = better_shares(shares, Speeds(none_s, said, limit), total, gain=gain)
        worth = 0 if better is None else worth + 1
        if better is not None and worth >= _LOOKS:
            shares, worth, changes = better, 0, changes + 1
        took_s += float((np.array(shares) * row).max())
    equal_s = float(per_worker * seconds[1:].max(axis=1).sum())
    return {"gain": 1.0 - took_s / equal_s, "changes": changes}


def stragglers(seconds: Values) -> dict[str, Any]:
    """All that is said of a job."""
    expected = levels(seconds)
    gains = fractional(seconds, expected)
    errs = estimated(seconds, ExpectedSpeed)[1]
    rule = {
        str(per_worker): {
            name: by_rule(seconds, expected[name], per_worker, errs if name == EXPECTED else None)
            for name in ("lag-1", "SpeedEstimate", CHOSEN, EXPECTED)
        }
        for per_worker in PER_WORKER
    }
    return {
        "moments": len(seconds),
        "workers": seconds.shape[1],
        "fractional_gain": gains,
        "of_lag_1": {name: gain / gains["lag-1"] for name, gain in gains.items()},
        "by_rule": rule,
    }


def undisturbed(make: Follows, scatter: float, seed: int, hiccups: float = 0.0) -> int:
    """How often shares change in 500 steps by the rule of a run, though no worker's speed does.

    Args:
        make: What follows a worker.
        scatter: Standard deviation of the logarithm of each one's seconds.
        seed: Of what is left to chance.
        hiccups: The part of the steps, of each worker, that take three times as long.
    """
    chance = np.random.default_rng(seed)
    truth = [Speed(fixed_s=0.05, micro_batch_s=one) for one in (0.1, 0.1, 0.2)]
    estimates = [make(one) for one in truth]
    shares = fit_shares(truth, STEP)
    worth = changes = 0
    for _ in range(UNDISTURBED):
        for estimate, one, share in zip(estimates, truth, shares, strict=True):
            factor = float(np.exp(scatter * chance.standard_normal()))
            factor *= 3.0 if chance.random() < hiccups else 1.0
            estimate.observe(share, 1, one.seconds(share) * factor)
        known = Speeds.of([estimate.speed for estimate in estimates])
        slowest = int(known.seconds(np.array(shares)).argmax())
        gain = dead_band(GAIN, getattr(estimates[slowest], "error", 0.0))
        better = better_shares(shares, known, STEP, gain=gain)
        worth = 0 if better is None else worth + 1
        if better is not None and worth >= _LOOKS:
            shares, worth, changes = better, 0, changes + 1
    return changes


def noises() -> dict[str, dict[str, list[int]]]:
    """By name and by scatter, how often shares change with each of five seeds."""
    cases = {f"{scatter:.0%}": (scatter, 0.0) for scatter in (0.03, 0.05, 0.1, 0.15)}
    cases["5%, hiccups in 1%"] = (0.05, 0.01)
    return {
        name: {
            case: [undisturbed(make, scatter, seed, hiccups) for seed in range(5)]
            for case, (scatter, hiccups) in cases.items()
        }
        for name, make in FOLLOWS.items()
    }


def _rounded(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _rounded(value) for key, value in told.items()}
    return round(told, 4) if isinstance(told, float) else told


def main() -> None:
    """Measure all, say it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pods = loads(asked.data / "cluster" / "gpu_duty_cycle.parquet")
    jobs = {job: trace(asked.data / "straggler" / f"job_{job}_norm.csv") for job in JOBS}
    told = _rounded(
        {
            "gpu_duty_cycle": {
                "pods": len(pods),
                "values": sum(map(len, pods)),
                "mean_absolute_error": errors(pods),
                "used": used(pods),
            },
            "undisturbed_changes": noises(),
            "stragglers": {f"job_{job}": stragglers(rows) for job, rows in jobs.items()},
        }
    )
    text = json.dumps(told, indent=1) + "\n"
    print(text, end="")
    if asked.json:
        asked.json.write_text(text)


if __name__ == "__main__":
    main()
