"""Page of the strategies that raycloud started from: what each is here, and what it measured.

Every figure is read from the results' file that is named beside it, as the page is rendered.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A figure of a results' file.

    Attributes:
        file: Below the repository.
        said: The figure in words, from what the file holds.
    """

    file: str
    said: Callable[[Any], str]

    @property
    def text(self) -> str:
        """With a link to the file."""
        return f"{self.said(_read(self.file))} ([rows](../{self.file}))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One strategy of the sources.

    Attributes:
        name: As the sources call it.
        here: What it is called here, and what it does.
        modules: Where it is, below `raycloud/`.
        command: That shows it; empty: there is none.
        test: That holds what the command shows, below `tests/`.
        measured: What came of it.
        lacks: What is not there.
    """

    name: str
    here: str
    modules: tuple[str, ...] = ()
    command: str = ""
    test: str = ""
    measured: Measured | None = None
    lacks: str = ""


@cache
def _read(file: str) -> Any:
    return json.loads((ROOT / file).read_text(encoding="utf-8"))


def ratio(contestant: str, measure: str = "ratio_to_limit") -> Callable[[Any], str]:
    """The median of a contestant's rows in a race."""

    def said(found: Mapping[str, Any]) -> str:
        rows = [one for one in found["rows"] if one["contestant"] == contestant]
        values = [one[measure] for one in rows if one.get(measure) is not None]
        of = "of the limit" if measure == "ratio_to_limit" else "goodput"
        times = f"median of {len(values)} runs" if len(values) > 1 else "one run"
        return f"{statistics.median(values):.2f} {of}, {times}"

    return said


def _sweep(found: Mapping[str, Any]) -> str:
    each: dict[str, list[float]] = {}
    for row in found["rows"]:
        if row.get("each_s") is not None:
            each.setdefault(row["contestant"], []).append(row["each_s"])
    ours = statistics.median(each["raycloud-sweep"])
    return f"a trivial trial after the first takes {ours:.2f} s"


def _ingest(name: str) -> Callable[[Any], str]:
    def said(found: Mapping[str, Any]) -> str:
        [one] = [verdict for verdict in found["verdicts"] if verdict["name"] == name]
        return f"{name}: {one['value']:.2f} {one['unit']}"

    return said


def _stale(found: Mapping[str, Any]) -> str:
    losses = {one["contestant"]: one["ratio_to_limit"] for one in found["rows"]}
    return f"S2: {losses['raycloud-ssp']:.2f} of the limit bounded, " + (
        f"{losses['raycloud-asynchronous']:.2f} unbounded, one run each"
    )


def _stored(found: list[Mapping[str, Any]]) -> str:
    """Seconds of reading all, predicted by a sample, against those measured."""
    off = [abs(one["off"]) for one in found]
    rates = ", ".join(f"{rate:g}" for rate in sorted({one["mbit_per_s"] for one in found}))
    what = f"{len(found)} sources at {rates} Mbit/s"
    middle = statistics.median(off)
    return f"predicted seconds of {what}: {max(off):.0%} off at most, median {middle:.0%}"


def _codecs(found: list[Mapping[str, Any]]) -> str:
    """Of the race's model, against the fp32 run of the same seed on the same machine."""
    same = [one for one in found if one["model"] == "testbed" and one["period"] == 1]

    def by_run(codec: str) -> dict[tuple[Any, ...], float]:
        rows = [one for one in same if one["codec"] == codec]
        return {
            (one["seed"], one["machine"], updates): loss
            for one in rows
            for updates, loss in one["losses"].items()
            if updates == max(one["losses"], key=int)
        }

    base, texts = by_run("none"), []
    for codec in ("bf16", "int8", "int4"):
        pairs = [(loss, base[run]) for run, loss in by_run(codec).items() if run in base]
        more = statistics.mean(loss / whole - 1 for loss, whole in pairs)
        texts.append(f"{codec} {100 * more:+.2f}% ({len(pairs)} seeds)")
    return f"held-out loss, in each step: {', '.join(texts)}"


def _backups(found: Mapping[str, Any]) -> str:
    runs = found["stragglers_by_control"]["job_1_norm"]["64 each"]
    both, alone = runs["control and backups"]["saved"], runs["control"]["saved"]
    return f"on a real trace (job_1) {both:.1%} of the time saved, {alone:.1%} without backups"


PAPERS = (
    Strategy(
        name="Dynamic task allocation: Load = Tasks / Capacity, levelled live",
        here="`elastic.shares: auto`: each worker's micro-batches of a step follow the speed that "
        "is expected of it",
        modules=("planner/shares.py", "control/shares.py", "planner/expected.py"),
        command="python -m benchmarks.run --scenario S4 --contestants limit,raycloud",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/S4.json", said=ratio("raycloud", "goodput")),
    ),
    Strategy(
        name="Straggler mitigation, monitoring",
        here="work of who is late in a step is offered to others (`elastic.backup_micro_batches`); "
        "machines answer for themselves, and who is silent is left out",
        modules=("step/speculation.py", "recovery/backups.py", "control/failure_detector.py"),
        command="python -m benchmarks.backups",
        test="ray/test_backups.py",
        measured=Measured(
            file=f"{RESULTS}/simulated.json",
            said=_backups,
        ),
    ),
    Strategy(
        name="Redundant tasks",
        here="the first result of a micro-batch counts, and its owner says so "
        "([decision](decisions/0017-the-first-result-counts-and-its-owner-says-so.md))",
        modules=("step/speculation.py",),
    ),
    Strategy(
        name="Checkpoint and restart",
        here="survivors go on in place; only where nobody has the state a checkpoint is loaded",
        modules=("checkpoint", "recovery", "control/recovery.py"),
        command="python -m benchmarks.run --scenario S5 --contestants limit,raycloud",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/S5.json", said=ratio("raycloud", "goodput")),
    ),
    Strategy(
        name="Equal and stratified partitions",
        here="`data.partition_by`, `data.stratify`",
        modules=("data", "order/layout.py"),
        command="python -m benchmarks.ingest",
        test="unit/test_benchmarks_ingest.py",
        measured=Measured(
            file="benchmarks/baselines/ingest.json",
            said=lambda found: (
                "the rarest stratum of a partition has "
                f"{found['sections']['stratified']['worst_rows']:.0%} of its rows at least"
            ),
        ),
    ),
    Strategy(
        name="Caching and prefetching",
        here="blocks kept by content on each node, `data.prefetch_steps`, what is read first is "
        "pinned in memory",
        modules=("data", "on_ray/pipeline.py", "step/feed.py"),
        command="python -m benchmarks.ingest",
        test="unit/test_benchmarks_ingest.py",
        measured=Measured(
            file="benchmarks/baselines/ingest.json",
            said=_ingest("cold / best peer as documented"),
        ),
    ),
    Strategy(
        name="Storage cost",
        here="`raycloud plan` samples a source on another machine and says what reading it once, "
        "and again in each epoch, takes and costs (`data.prices`), and keeping checkpoints; the "
        "report says what was read and kept",
        modules=("planner/storage.py", "data/sampling.py", "report/data.py"),
        command="python -m benchmarks.storage",
        test="unit/test_planner_storage.py",
        measured=Measured(file=f"{RESULTS}/storage.json", said=_stored),
        lacks="rows are always kept; where reading again would cost less, the plan says so",
    ),
    Strategy(
        name="Quantization of updates to 16 and 8 bits, and fewer",
        here="`sync.codec`: bf16, int8, int4, topk; what is lost is kept and sent later",
        modules=("sync/codecs.py", "sync/residual.py"),
        command="python -m benchmarks.codecs",
        test="unit/test_sync_codecs.py",
        measured=Measured(file=f"{RESULTS}/sync_grid.json", said=_codecs),
    ),
    Strategy(
        name="Local aggregation",
        here="`sync.period`: workers make some steps by themselves, and then exchange how far they "
        "have come; `sync.stream`: in fragments, while they compute",
        modules=("step/rounds.py", "step/fragments.py", "sync/period.py"),
        command="python -m benchmarks.run --scenario S3 --contestants limit,raycloud-auto",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/sync/S3.json", said=ratio("raycloud-auto")),
    ),
    Strategy(
        name="Hierarchical aggregation",
        here="`sync.topology: tree`: whole inside a zone, encoded between zones",
        modules=("net/tree.py",),
        command="python -m benchmarks.run --scenario S9 --contestants limit,raycloud-auto",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/sync/S9.json", said=ratio("raycloud-auto-tree")),
    ),
    Strategy(
        name="Asynchronous updates",
        here="`sync.staleness` with servers: bounded (SSP), or unbounded",
        modules=("step/asynchronous.py", "server"),
        command="python -m benchmarks.run --scenario S2 --contestants limit,raycloud-ssp",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/sync/S2-parts.json", said=_stale),
    ),
    Strategy(
        name="Parameter servers",
        here="`servers`: rows of `raycloud.Embedding`, or all parameters, on server actors with "
        "copies",
        modules=("server", "on_ray/servers.py", "embedding.py"),
        command="raycloud train jobs/recommend.yaml",
        test="ray/test_jobs.py",
        measured=Measured(
            file=f"{RESULTS}/tables.json",
            said=lambda found: (
                "rows of a million at 100 Mbit/s: {:.0f} times the samples of a dense ring".format(
                    statistics.median(r["samples_per_s"] for r in found["rows"]["rows"])
                    / statistics.median(r["samples_per_s"] for r in found["rows"]["ring"])
                )
            ),
        ),
    ),
    Strategy(
        name="Data and model parallelism",
        here="a step is a global batch, whoever computes it; tables are split over servers",
        modules=("order", "sync", "server"),
        lacks="a dense model is not split over several workers",
    ),
    Strategy(
        name="Heterogeneity-aware placement",
        here="`data.collators: auto`: which nodes train and which make batches; "
        "workers near each other, GPUs where the fewest are lost to others",
        modules=("planner/roles.py", "planner/placement.py", "planner/packing.py"),
        command="raycloud plan jobs/gpt.yaml",
        test="ray/test_plan.py",
        measured=Measured(
            file=f"{RESULTS}/roles.json",
            said=lambda found: (
                "{gain:.2f} times as fast as all nodes doing both, at most {bound:.2f}".format(
                    gain=found["gain"],
                    bound=found["plan"]["bound"],
                )
            ),
        ),
    ),
    Strategy(
        name="Elastic scaling",
        here="`elastic.min_workers`, `max_workers` (`auto`), `autoscale`; "
        "`raycloud scale RUN` while it runs",
        modules=("control/scaling.py", "control/membership.py", "on_ray/fleet.py"),
        command="python -m benchmarks.run --scenario S8 --contestants limit,raycloud",
        test="testbed/test_quick.py",
        measured=Measured(file=f"{RESULTS}/S8.json", said=ratio("raycloud", "goodput")),
    ),
    Strategy(
        name="Priority and fairness",
        here="runs that share seats are dealt them evenly, each its fewest first",
        modules=("tuning/deal.py", "on_ray/seats.py"),
        lacks="there are no priorities between runs",
    ),
    Strategy(
        name="AutoML",
        here="`raycloud sweep`: Ray Tune on shared seats",
        modules=("on_ray/sweep.py", "tuning"),
        command="raycloud sweep jobs/gpt_sweep.yaml",
        test="ray/test_sweep.py",
        measured=Measured(file=f"{RESULTS}/sweep.json", said=_sweep),
    ),
    Strategy(
        name="Cost and energy",
        here="predicted and measured: prices and watts by the labels of nodes, RAPL and NVML",
        modules=("planner/cost.py", "worker/energy.py", "report/predictions.py"),
        command="raycloud simulate jobs/gpt.yaml --cluster nodes.csv",
        test="unit/test_cli_simulate.py",
    ),
    Strategy(
        name="Load forecast by a grey Markov chain",
        here="one of several forecasts; the one that errs least is used, and named",
        modules=("planner/forecast.py", "planner/expected.py"),
        command="python -m benchmarks.forecast --data DIRECTORY",
        test="unit/test_planner_forecast.py",
        measured=Measured(
            file=f"{RESULTS}/forecast.json",
            said=lambda found: (
                "GPU duty cycles, error: {Forecast:.2f} by the choice, "
                "{last:.2f} by the last value, {grey:.2f} by the grey Markov chain alone".format(
                    **(errors := found["gpu_duty_cycle"]["mean_absolute_error"]["1"]),
                    last=errors["last value"],
                    grey=errors["grey Markov(12)"],
                )
            ),
        ),
    ),
    Strategy(
        name="Routes by a Markov decision process",
        here="a newcomer's state comes through a third worker where its own link is thin",
        modules=("planner/routes.py", "recovery/relay.py"),
        command="python -m benchmarks.relaying",
        test="testbed/test_links.py",
        measured=Measured(
            file=f"{RESULTS}/relaying.json",
            said=lambda found: (
                f"{found['times_as_fast']:.1f} times as fast on a triangle of "
                f"{found['thin_mbit_per_s']:g} and {found['wide_mbit_per_s']:g} Mbit/s"
            ),
        ),
    ),
)

PRACTICAL = (
    Strategy(
        name="Batch size",
        here="`global_batch` is swept; the gradient noise scale and the largest pass that memory "
        "holds are reported; `rate_scaling`",
        modules=("worker/calibration.py", "step/adascale.py"),
    ),
    Strategy(
        name="Preprocessing",
        here="`Task.preprocess`, once for each row, kept",
        modules=("data", "on_ray/pipeline.py"),
    ),
    Strategy(
        name="Pruning and quantization of the model",
        here="the task's own, as `torch.nn.utils.prune`",
        lacks="raycloud adds nothing to it",
    ),
    Strategy(
        name="Training: accumulation, mixed precision, compilation",
        here="`micro_batch` and `fuse`, `precision: bf16`, `compile`",
        modules=("step/compute.py", "step/forward.py"),
    ),
    Strategy(
        name="Network and storage",
        here="`sync`, `data.cache`; see above",
        modules=("sync", "net", "data"),
    ),
    Strategy(
        name="Distributed strategies",
        here="`sync.topology`, `period`, `staleness`, `codec`; `raycloud train --tour` measures "
        "several",
        modules=("sync", "control/sync.py"),
    ),
    Strategy(
        name="Multi-task and incremental",
        here="files that are added while a run goes on are trained on from the next epoch "
        "(`data.refresh`); several losses are the task's",
        modules=("on_ray/pipeline.py", "control/data.py"),
        command="raycloud train jobs/recommend.yaml",
        test="ray/test_jobs.py",
    ),
    Strategy(name="Asynchronous", here="see above", modules=("step/asynchronous.py",)),
    Strategy(
        name="Caching and pre-warming",
        here="blocks, seats with processes that have loaded torch",
        modules=("data", "on_ray/seats.py"),
    ),
    Strategy(
        name="Off-peak",
        here="a run stops and goes on at any time without losing a step",
        modules=("control/checkpoints.py",),
        lacks="nothing starts runs when prices are low",
    ),
    Strategy(
        name="Memory and pipelining",
        here="passes no larger than memory holds; batches are made ahead, the exchange overlaps "
        "the backward pass",
        modules=("worker/calibration.py", "step/feed.py", "sync/buckets.py"),
    ),
    Strategy(name="Hyperparameters", here="`raycloud sweep`", modules=("tuning",)),
    Strategy(name="Parameter servers", here="see above", modules=("server",)),
    Strategy(
        name="Few-shot and transfer",
        here="a task loads what weights it likes in `Task.model`; parameters that need no gradient "
        "do not travel",
        modules=("task.py",),
    ),
    Strategy(
        name="Combined parallelism",
        here="tables on servers beside a ring of all else, in one transaction",
        modules=("step/tables.py",),
    ),
    Strategy(
        name="Dynamic graphs",
        here="PyTorch's own; parameters that a pass does not use are exact, too",
        modules=("sync/gradients.py",),
    ),
    Strategy(
        name="Ensembles and distillation",
        here="a teacher is a part of the task's model that needs no gradient",
        lacks="raycloud adds nothing to it",
    ),
)

_INTRO = """\
# Strategies

<!-- Generated by docs/generate.py from docs/strategies.py and the results: change it there. -->

raycloud starts from the strategies of four papers and of practice: what each is called here, where
it is, what shows it, and what came of it. A figure stands in the file beside it, with its machine.
A race takes an hour; with `--quick` it only shows that it works.
"""

_DECLINED = """\
## Declined

TensorFlow and Horovod: a task is plain PyTorch, and its exchange is raycloud's own, since a group
that changes at any step is what it is for. TPUs, FPGAs and quantum processors: nothing here could
be tried on one. Edge devices: workers are Ray nodes, and a Ray node is a machine that others may
connect to.
"""


def _row(one: Strategy) -> str:
    here = one.here + (f". Not there yet: {one.lacks}" if one.lacks else "")
    modules = ", ".join(f"`{name}`" for name in one.modules)
    command = f"`{one.command}`" if one.command else ""
    measured = one.measured.text if one.measured else ""
    return f"| {one.name} | {here} | {modules} | {command} | {measured} |"


def render() -> str:
    """The page."""
    head = ["| strategy | here | in `raycloud/` | shown by | measured |", "|---|---|---|---|---|"]
    parts = [_INTRO]
    for title, some in (("Of the papers", PAPERS), ("Of practice", PRACTICAL)):
        parts.append("\n".join([f"## {title}\n", *head, *map(_row, some)]) + "\n")
    return "\n".join([*parts, _DECLINED])
