"""Real runs of `raycloud train`: waiting for data, storage, and what `jobs/` reach."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.feeding.contestants import attempt, started
from benchmarks.feeding.floors import Verdict, mean
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.machine import ROOT, load
from raycloud.report.log import read_events

if TYPE_CHECKING:
    from benchmarks.contestants import Attempt

WORKERS = 2
EPOCHS = 3
PRICE_PER_GB_MONTH = 0.08  # of a general-purpose network disk at a large cloud, in dollars
LONGEST_S = 600.0
LEAST_ACCURACY = 0.70

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run that ended: its summary and its events."""

    summary: Record
    events: tuple[Record, ...]

    def all(self, kind: str) -> list[Record]:
        """The events of a kind."""
        return [event for event in self.events if event.get("event") == kind]


def train(place: Attempt, job: str, settings: Sequence[str]) -> Done:
    """Run a job of `jobs/` as a user does.

    Raises:
        CommandFailedError: It failed.
    """
    command = [
        *(str(Path(sys.executable).with_name("raycloud")), "train", str(ROOT / "jobs" / job)),
        *("--run-dir", str(place.run_directory), "--plain"),
        *(f"--set={one}" for one in settings),
    ]
    started(command, place, {})
    log = read_events(place.run_directory / "events.jsonl")
    return Done(
        summary=json.loads((place.run_directory / "summary.json").read_text()),
        events=tuple({"event": type(one).__name__, **asdict(one)} for _, one in log),
    )


def measure_waiting(setting: Setting) -> Outcome:
    """`jobs/cifar.yaml` with two workers and an empty cache, for a few epochs."""
    runs: list[Record] = []
    for repeat in range(1 if setting.quick else min(setting.repeats, 3)):
        with attempt() as place:
            load_before = load()
            done = train(
                place,
                "cifar.yaml",
                [
                    f"data.path={setting.images.directory}",
                    f"data.cache.path={place.directory / 'cache'}",
                    f"data.cache.price_per_gb_month={PRICE_PER_GB_MONTH}",
                    f"elastic.min_workers={WORKERS}",
                    f"elastic.max_workers={WORKERS}",
                    f"epochs={EPOCHS}",
                ],
            )
        runs.append({"load_before": load_before, **waited(done), "summary": done.summary})
        setting.say(
            f"waiting, repeat {repeat}: cold {runs[-1]['cold_share']:.2%}, "
            f"later {runs[-1]['later_share']:.2%}"
        )
    verdicts = [
        mean("waiting for data: first epoch, cold", shares(runs, "cold_share"), at_most=10.0),
        mean("waiting for data: first epoch, without preparing", shares(runs, "feed_share")),
        mean("waiting for data: later epochs", shares(runs, "later_share"), at_most=2.0),
    ]
    return Outcome(record={"runs": runs}, text="", verdicts=verdicts + storage(runs))


def storage(runs: Sequence[Record]) -> list[Verdict]:
    """What keeping the blocks costs and reading them takes, by the runs' own reports."""
    told = [run["summary"]["data"] for run in runs]
    note = f"D = {told[0]['bytes'] / 1e9:.3f} GB at {PRICE_PER_GB_MONTH} a month and GB"
    return [
        mean(
            "storage: T_access, an epoch's reads of both",
            [one["access_s"] for one in told],
            unit=" s",
        ),
        mean("storage: C_storage", [one["cost_per_month"] for one in told], unit=" /month"),
        replace(
            mean(
                "storage: D / (T_access C_storage)",
                [one["efficiency"] for one in told],
                unit=" GB/s",
            ),
            note=note,
        ),
    ]


def shares(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A share of every run, in percent."""
    return [100 * run[name] for run in runs]


def waited(done: Done) -> Record:
    """What part of their time members waited for data, in the first epoch and later.

    To the first epoch belongs what each member waited until the data was prepared, with nothing
    else to do.
    """
    prepared = [one for one in done.all("DataPrepared") if one["version"] == 0]
    preparing_s = max((one["seconds"] for one in prepared), default=0.0)
    waited_s = sum(one["waited_s"] for one in prepared)
    spent = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for one in done.all("StepsCommitted"):
        first = (one["epoch"], one["offset"]) <= (1, 0)
        spent[first][0] += one["data_s"]
        spent[first][1] += one["wall_s"]
    (cold_data_s, cold_s), (later_data_s, later_s) = spent[True], spent[False]
    return {
        "preparing_s": preparing_s,
        "waited_s": waited_s,
        "cold_share": (cold_data_s + waited_s) / (cold_s + waited_s),
        "feed_share": cold_data_s / cold_s,
        "later_share": later_data_s / later_s,
    }


def measure_cifar(setting: Setting) -> Outcome:
    """`jobs/cifar.yaml` as it is: accuracy and time."""
    with attempt() as place:
        settings = [f"data.path={setting.images.directory}"]
        settings += [f"data.cache.path={place.directory / 'cache'}"]
        settings += ["epochs=1"] if setting.quick else []
        done = train(place, "cifar.yaml", settings)
    return Outcome(
        record={"summary": done.summary},
        text="",
        verdicts=[
            Verdict(
                name="cifar.yaml: accuracy",
                value=done.summary["eval"]["accuracy"],
                at_least=LEAST_ACCURACY,
            ),
            Verdict(
                name="cifar.yaml: time, all of it",
                value=done.summary["wall_s"],
                unit=" s",
                at_most=LONGEST_S,
            ),
        ],
    )
