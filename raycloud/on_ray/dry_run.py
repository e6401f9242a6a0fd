"""Dry runs on the machines: `plan` measures them, `try_out` does two steps.

`train --try` sends a job through every room, and nothing is left of it. It is driven twice: first
it prepares the data, computes, exchanges, measures the held-out samples and writes a checkpoint;
then it begins from that checkpoint, as a resumed run does. The schedule of the learning rate is
made for the whole job. Preprocessed rows stay in the cache, where the run in earnest finds them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from raycloud.clock import SystemClock
from raycloud.errors import RaycloudError, RunDirectoryError, SpecError
from raycloud.events import CheckpointPublished, StepsCommitted
from raycloud.on_ray.attach import attached, free, node_id_here
from raycloud.on_ray.run import imported, with_secrets
from raycloud.planner.described import Described, of_launcher, read_table
from raycloud.planner.placement import place
from raycloud.planner.plan import Plan, choose_roles, make, speeds_in, workers
from raycloud.planner.storage import Paid, Storage, checkpoints_cost, weigh
from raycloud.report.summary_text import Tried
from raycloud.spec import Environment, Job, RunDirectory
from raycloud.spec.load import option_text
from raycloud.spec.rundir import RUNS
from raycloud.spec.secrets import place_of
from raycloud.task import Source, Task

if TYPE_CHECKING:
    from raycloud.data.location import File
    from raycloud.events import Observed
    from raycloud.on_ray.session import Run, StopSwitch
    from raycloud.on_ray.survey import MeasuresFile
    from raycloud.packing.code import TaskCode
    from raycloud.planner.cost import Profile
    from raycloud.planner.inventory import Inventory
    from raycloud.planner.roles import Machine
    from raycloud.spec.sizes import SourceRate

STEPS = 2


def plan(
    job: Job,
    *,
    address: str | None = None,
    cluster: str | Path | None = None,
    reuse: bool = False,
) -> Plan:
    """What `train` would do, found out by measuring the machines; nothing is trained.

    Args:
        job: What is asked.
        address: A Ray cluster, as `train` takes it.
        cluster: A file that describes the cluster that is meant: a CSV table of nodes, or what `ray
            up` takes; see `planner.described`. One worker is measured, at `address` or here.
        reuse: Take what was measured within a day, of the same task and job on the same nodes, and
            keep what is measured now, in the user's cache.

    Raises:
        JobError: What was asked cannot be done.
        MachineError: The cluster has no room.
    """
    meant = None if cluster is None else described(Path(cluster))
    job = with_secrets(job)
    address = address or Environment.from_process().ray_address
    with imported(job) as ready, attached(job, address):
        task, code = ready()
        from raycloud.on_ray.survey import MeasuresFile

        folder = Environment.from_process().cache / "measures"
        kept = MeasuresFile(folder, job, code) if reuse else None
        nodes = free()  # others may run there
        if meant is not None:
            made = replace(_meant(job, code, nodes, meant, kept), cluster=str(cluster))
        elif job.data.collators == "auto":
            made = _with_roles(job, code, nodes, kept)
        else:
            made = _here(job, code, nodes, kept)
        storage = _stored(job, made, _sampled(job, task, code) if made.kept_s is None else None)
        return made if storage == Storage() else replace(made, storage=storage)


def _sampled(job: Job, task: type[Task], code: TaskCode) -> tuple[str, SourceRate] | str | None:
    """A sample of the source, where the job may have one on another machine."""
    path = job.data.path
    rows = task.preprocess is not Task.preprocess  # which is for those of a `Source`
    remote = rows if path is None else "://" in path
    return _sample_here(code, job) if remote else None


def _sample_here(code: TaskCode, job: Job) -> tuple[str, SourceRate] | str | None:
    """See `sampled`; in another process of this node, since the task's code may do anything."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id_here(), soft=False)
    asked = ray.remote(sampled).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    cpus = int(ray.cluster_resources().get("CPU", 1))
    try:
        found: tuple[str, SourceRate] | str | None = ray.get(
            asked.remote(code, code.named_in(job), cpus)
        )
    except RayError as error:
        return f"its process ended: {type(error).__name__}"
    return found


def sampled(
    task: type[Task] | TaskCode, job: Job, cpus: int
) -> tuple[str, SourceRate] | str | None:
    """Where training samples come from, and how fast this process has read some of them.

    None: not from another machine. A text: why it could not. Held-out files are counted, too.
    `cpus`: all there are; a process reads with those of its machine at most.
    """
    from raycloud.data.sampling import sample
    from raycloud.step.contract import construct
    from raycloud.worker.dataset import task_splits

    try:
        splits = task_splits(construct(task, job), job)
        if not isinstance(splits.train, Source) or splits.train.path is None:
            return None
        files = _remote(splits.train)
        if not files:
            return None
        here = min(cpus, os.cpu_count() or 1)
        readers = here if job.data.cpus == "auto" else min(here, job.data.cpus)
        found = sample(splits.train, SystemClock(), max(1, readers), files)
        if isinstance(splits.held_out, Source) and splits.held_out.path is not None:
            others = _remote(splits.held_out)
            size = found.bytes + sum(file.bytes for file in others)
            found = replace(found, files=found.files + len(others), bytes=size)
    except RaycloudError as error:
        return error.message
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].path}{more}", found  # without credentials, also of a chained URL


def _remote(source: Source) -> list[File]:
    from raycloud.data.location import is_local, locate

    return [file for file in locate(source) if not is_local(file.path)]


def _meant(
    job: Job, code: TaskCode, nodes: Inventory, meant: Described, kept: MeasuresFile | None
) -> Plan:
    """The plan for a cluster that is described; one worker is measured on these nodes."""
    from raycloud.on_ray.survey import survey

    there = meant.inventory
    placed = place(there, workers(job, there), job.resources.worker)
    here = place(nodes, 1, job.resources.worker)
    found = survey(job, code, nodes, here, kept)
    one = found.profile(here)
    if job.data.collators == "auto":
        [first] = found.readies[here[0]]
        machines = meant.machines(one, first.collate_s, job.resources.worker)
        able = [x.node for x in machines if x.workers]
        made = _in_roles(job, there, meant.profile(one, able), machines)
    else:
        profile = meant.profile(one, placed)
        made = make(job, there, profile, placed=dict(enumerate(placed)), compare=True)
    return replace(made, kept_s=found.kept_s)


def _here(job: Job, code: TaskCode, nodes: Inventory, kept: MeasuresFile | None) -> Plan:
    """The plan for these nodes, all of whose workers train."""
    from raycloud.on_ray.survey import survey

    placed = place(nodes, workers(job, nodes), job.resources.worker)
    found = survey(job, code, nodes, placed, kept)
    profile, on = found.profile(placed), dict(enumerate(placed))
    return replace(make(job, nodes, profile, placed=on, compare=True), kept_s=found.kept_s)


def _stored(job: Job, made: Plan, sampled: tuple[str, SourceRate] | str | None) -> Storage:
    """What the job's storage takes, by a sample of its source."""
    found = Storage()
    if (prices := job.checkpoint.prices) is not None:
        parts = len(made.members) + 1  # and the manifest
        month, each = checkpoints_cost(prices, made.state_bytes, job.checkpoint.keep, parts)
        found = Storage(checkpoints_month=month, checkpoint_each=each)
    if isinstance(sampled, str):
        return replace(found, why=sampled)
    if sampled is None:
        return found
    source, rate = sampled
    reading = weigh(
        source,
        rate,
        Paid(
            reading=job.data.prices,
            disk_per_gb_month=job.data.cache.price_per_gb_month,
            nodes_per_hour=made.price_per_hour,
        ),
        epochs=made.steps / max(1, made.steps_per_epoch),
        job_s=made.job_s,
        nodes=len({one.node for one in made.members}),
    )
    return replace(found, reading=reading)


def _with_roles(job: Job, code: TaskCode, nodes: Inventory, kept: MeasuresFile | None) -> Plan:
    """The plan of a job whose nodes get their roles by what is measured."""
    from raycloud.on_ray.roles import measure, profile_of

    found, machines = measure(job, code, nodes, kept)
    return replace(_in_roles(job, nodes, profile_of(found), machines), kept_s=found.kept_s)


def _in_roles(job: Job, nodes: Inventory, profile: Profile, machines: Sequence[Machine]) -> Plan:
    """The plan with the roles of these machines; of the profile no worker's own values count."""
    profile = replace(profile, cores=())
    roles = choose_roles(job, nodes, profile, machines)
    elastic = job.elastic.model_copy(update={"max_workers": len(roles.trainers)})
    return make(
        job.model_copy(update={"elastic": elastic}),
        nodes,
        replace(profile, speeds=speeds_in(job, roles)),
        placed=dict(enumerate(roles.trainers)),
        compare=True,
        roles=roles,
    )


def measured(job: Job, *, address: str | None = None) -> Profile:
    """What one worker measures of the task, at `address` or here; nothing is trained or kept.

    Raises:
        JobError: What was asked cannot be done.
        MachineError: There is no room for a worker.
    """
    job = with_secrets(job)
    address = address or Environment.from_process().ray_address
    with imported(job) as ready, attached(job, address):
        _, code = ready()
        from raycloud.on_ray.survey import survey

        nodes = free()
        here = place(nodes, 1, job.resources.worker)
        return survey(job, code, nodes, here).profile(here)


def described(path: Path) -> Described:
    """The cluster that a file describes.

    Raises:
        SpecError: It cannot be read, or says what cannot be.
    """
    text = option_text("--cluster", path, "give a CSV or YAML file")
    if path.suffix in {".yaml", ".yml"}:
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SpecError(
                "--cluster", str(path), f"is no YAML: {error}", hint="correct it"
            ) from error
        return of_launcher(found if isinstance(found, dict) else {}, path.name)
    return read_table(text, path.name)


def try_out(
    job: Job,
    *,
    run_dir: Path | None = None,
    address: str | None = None,
    observer: Callable[[Observed], None] | None = None,
    stop: StopSwitch | None = None,
    started_s: float | None = None,
) -> Tried:
    """Send two steps of `job` through every room.

    Raises:
        RaycloudError: What the run in earnest would end with.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s() if started_s is None else started_s
    address = address or Environment.from_process().ray_address
    asked, job = job, with_secrets(job)
    with (
        _folder(run_dir) as folder,
        _small(job) as small,
        imported(job) as ready,
        attached(job, address),
    ):
        task, code = ready()
        from raycloud.on_ray.launch import drive
        from raycloud.on_ray.session import Session

        runs: list[Run] = []
        for resume in (False, True):
            session = Session(
                job=small,
                asked=asked.model_copy(update={"evaluate": small.evaluate}),
                task=task,
                code=code,
                directory=RunDirectory(folder),
                resume=resume,
                clock=clock,
                began_s=clock.monotonic_s() if resume else began_s,
                observer=observer or (lambda _: None),
                stop=stop,
                only_steps=STEPS,
            )
            runs.append(drive(session))
            if runs[-1].status != "finished":
                break
        place = place_of(job.checkpoint.path) or str(folder.parent)
        return _tried(job, runs, place, wall_s=clock.monotonic_s() - began_s)


def _tried(job: Job, runs: list[Run], place: str, *, wall_s: float) -> Tried:
    summary, events = runs[0].summary, runs[0].events
    last = next((one for one in reversed(events) if isinstance(one, StepsCommitted)), None)
    saved = [one.state_bytes for one in events if isinstance(one, CheckpointPublished)]
    return Tried(
        job=job.name,
        status=runs[-1].status,
        steps=summary["steps"],
        workers=summary["workers"],
        samples=summary["samples"],
        first_step_s=summary["first_step_s"],
        step_s=last.wall_s / (last.last_step - last.first_step) if last else None,
        measures=runs[-1].metrics,
        checkpoint_bytes=saved[-1] if saved else 0,
        checkpoint_place=place,
        wall_s=wall_s,
    )


@contextlib.contextmanager
def _folder(run_dir: Path | None) -> Iterator[Path]:
    """A folder on the file system where the run would be; gone afterwards, as are its parents.

    An error that names it says instead that nothing was kept.
    """
    root = RUNS if run_dir is None else run_dir.parent
    with _gone_again(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".try-", dir=root))
        except OSError as error:
            raise RunDirectoryError(
                f"the run cannot be kept in {root}: {error.strerror}",
                hint="give a directory that can be written with --run-dir",
            ) from error
        try:
            yield folder
        except RaycloudError as error:
            if str(folder) in error.hint:
                error.hint = "it was tried, so nothing was kept; --debug shows the traceback"
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _small(job: Job) -> Iterator[Job]:
    """The job with few held-out samples, and its checkpoints in a place that is removed again."""
    most = job.evaluate.batch * job.most_workers
    samples = min(most, job.evaluate.max_samples or most)
    update = {
        "evaluate": job.evaluate.model_copy(update={"max_samples": samples}),
        "data": job.data.model_copy(update={"refresh": False}),
        "tracking": type(job.tracking)(),  # off: what is tracked elsewhere would stay there
    }
    if job.checkpoint.path is None:
        yield job.model_copy(update=update)
        return
    place = f"{job.checkpoint.path.rstrip('/')}/try-{secrets.token_hex(4)}"
    update["checkpoint"] = job.checkpoint.model_copy(update={"path": place})
    here = _local(place)
    with _gone_again(here.parent) if here else contextlib.nullcontext():
        try:
            yield job.model_copy(update=update)
        except BaseException:
            with contextlib.suppress(RaycloudError):  # what ended the run is what one should see
                _remove(place)
            raise
        _remove(place)


def _remove(place: str) -> None:
    """Every file that was written to a place, and the place where it is a local directory."""
    from raycloud.checkpoint import open_store

    if here := _local(place):
        shutil.rmtree(here, ignore_errors=True)
    else:
        store = open_store(place)
        store.remove_all(list(store.sizes()))


def _local(place: str) -> Path | None:
    """The directory that a path or URL names on this machine; None: it is elsewhere."""
    protocol, found, rest = place.partition("://")
    if not found:
        return Path(place)
    return Path(rest) if protocol in {"file", "local"} else None


@contextlib.contextmanager
def _gone_again(path: Path) -> Iterator[None]:
    """A directory, and those above it, that are not there yet: removed afterwards if empty."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    finally:
        for place in missing:  # the innermost first
            with contextlib.suppress(OSError):  # somebody else uses it by now
                place.rmdir()
