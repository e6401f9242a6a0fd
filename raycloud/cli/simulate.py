"""`simulate`: a job on a cluster that is described, on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.shell import (
    AddressOption,
    JobFileArgument,
    SetOption,
    command,
    say,
)

if TYPE_CHECKING:
    from raycloud.planner.cost import Profile
    from raycloud.spec.job import Job


@command()
def simulate(
    job: JobFileArgument,
    *,
    cluster: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The cluster: a CSV table of its nodes, or what `ray up` takes.",
        ),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Machines held over time (JSON), or batch times of its workers (CSV).",
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="On so many nodes like these instead, e.g. 10,100,1000, with as many workers.",
        ),
    ] = "",
    weak: Annotated[
        bool, typer.Option("--weak", help="With --nodes: global_batch grows with the workers.")
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A plan.json, of a run or of `plan --json`: nothing is measured again.",
        ),
    ] = None,
    faults_per_day: Annotated[
        float | None,
        typer.Option(help="By default as large clusters tell; with --trace, none beside it."),
    ] = None,
    start_s: Annotated[
        float, typer.Option(help="Until a worker that is asked for computes.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Of what is left to chance.")] = 0,
    overrides: SetOption = None,
    address: AddressOption = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all of it there; - is stdout."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write a page with charts.")
    ] = None,
) -> None:
    """Carry a job out on a described cluster, in virtual time: time, cost, goodput, utilization.

    One worker is measured here, or at --address; see `--measured`. Planner and control are a run's.
    """
    from raycloud.spec import load_job

    asked = load_job(job, overrides or ())
    from raycloud.errors import SpecError
    from raycloud.on_ray.dry_run import described
    from raycloud.report.simulated import simulated_page, simulated_text
    from raycloud.simulate.jobs import Circumstances, reported
    from raycloud.simulate.traces import read_trace

    cluster_file, sizes = described(cluster), _sizes(nodes)
    if weak and not sizes:
        what = "makes the batch grow with numbers of nodes, and there are none"
        raise SpecError("--weak", "", what, hint="write --nodes 10,100,1000, or leave it out")
    around = Circumstances(
        trace=None if trace is None else read_trace(trace),
        faults_per_day=faults_per_day,
        start_s=start_s,
        seed=seed,
        nodes=sizes,
        weak=weak,
    )
    profile = _profile(asked, measured, address)
    record = reported(asked, profile, cluster_file, around, name=cluster.name)
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if page is not None:
        page.write_text(simulated_page(record), encoding="utf-8")
        say(f"wrote {page}")
    if json_file == Path("-"):
        typer.echo(text.rstrip())
        return
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
        say(f"wrote {json_file}")
    typer.echo(simulated_text(record))


def _sizes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, that are asked for in place of the cluster as it is."""
    from raycloud.errors import SpecError

    try:
        return tuple(int(one) for one in text.split(",") if one.strip())
    except ValueError:
        what = "is no list of numbers"
        raise SpecError("--nodes", text, what, hint="write --nodes 10,100,1000") from None


def _profile(job: Job, measured: Path | None, address: str | None) -> Profile:
    if measured is None:
        from raycloud.on_ray.dry_run import measured as measure

        return measure(job, address=address)
    from raycloud.errors import SpecError
    from raycloud.planner.plan import from_json
    from raycloud.spec.load import option_text

    plan = from_json(option_text("--measured", measured, "give a plan.json"))
    if plan.cluster is not None:
        what = f"is for the nodes that {plan.cluster} describes, whose speeds nobody has measured"
        hint = "give the plan.json of a run, or of `raycloud plan --json` without --cluster"
        raise SpecError("--measured", str(measured), what, hint=hint)
    return plan.measured()
