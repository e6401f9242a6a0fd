"""`raycloud simulate`: a job, a cluster and what was measured give a table, a file and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.planner.cost import Profile
from raycloud.planner.described import read_table
from raycloud.planner.plan import make
from raycloud.planner.speed import Speed
from raycloud.spec import Job, load_job

NODES = "name,count,mbit_s,price_per_hour\nfast,2,1000,1.5\n"
JOB = """\
task: gpt.py:Gpt
steps: 100
global_batch: 32
micro_batch: 2
elastic: {max_workers: 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job, a cluster, a plan of it, and traces."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt.py").touch()
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "nodes.csv").write_text(NODES)
    measured = Profile(
        samples=3200,
        parameters=10**6,
        gradient_bytes=4 * 10**6,
        state_bytes=12 * 10**6,
        speeds=(Speed(fixed_s=0.01, micro_batch_s=0.02),),
    )
    cluster = read_table(NODES, "nodes.csv")
    job: Job = load_job(tmp_path / "job.yaml", ())
    on = {0: "fast-0"}
    plan = make(job, cluster.inventory, cluster.profile(measured, ["fast-0"]), placed=on)
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "meant.json").write_text(replace(plan, cluster="nodes.csv").to_json())
    (tmp_path / "long.csv").write_text(f"worker,time,batch_time_norm\n0,1,5\n{'1' * 140_000},1,1\n")
    huge = f'{{"metadata": {{"gap_seconds": 60}}, "data": [1{"0" * 400}]}}'
    (tmp_path / "huge.json").write_text(huge)
    (tmp_path / "job.csv").write_text("worker,time,batch_time_norm\n0,1,5\n1,1,9\n0,2,5\n1,2,9\n")
    (tmp_path / "one.csv").write_text("worker,time,batch_time_norm\n0,1,5\n0,2,9\n")
    return tmp_path


def simulate(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    asked = ["simulate", "job.yaml", "--cluster", "nodes.csv", "--measured", "plan.json", *words]
    result = CliRunner().invoke(cli.app, asked)
    return result.exit_code, result.stdout, result.stderr


def test_a_table_a_file_and_a_page(project: Path) -> None:
    code, out, _ = simulate("--json", "out.json", "--page", "out.html", "--trace", "job.csv")
    assert code == 0
    told = json.loads((project / "out.json").read_text())
    [size] = told["sizes"]
    assert (told["format"], told["cluster"], told["trace"]) == (1, "nodes.csv", "job.csv")
    assert (size["status"], size["steps"], size["workers"]) == ("finished", 100, 2)
    assert size["cost"] == pytest.approx(3.0 * size["job_s"] / 3600)
    assert told["policies"][0]["policy"] == "equal"
    assert "goodput" in out
    assert "perfect foresight" in out
    page = (project / "out.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 1


@pytest.mark.usefixtures("project")
def test_many_sizes_to_stdout_are_the_same_each_time() -> None:
    words = ("--nodes", "2,4,8", "--weak", "--json", "-", "--page", "out.html")
    code, out, _ = simulate(*words)
    assert code == 0
    sizes = json.loads(out)["sizes"]
    assert [size["nodes"] for size in sizes] == [2, 4, 8]
    assert [size["global_batch"] for size in sizes] == [32, 64, 128]
    assert sizes[2]["samples_per_s"] > sizes[1]["samples_per_s"] > sizes[0]["samples_per_s"]
    assert simulate(*words)[1] == out
    assert Path("out.html").read_text().count("<svg") == 6


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "2;4"), "--nodes = '2;4': is no list of numbers"),
        (("--trace", "none.csv"), "--trace = 'none.csv': cannot be read"),
        (("--trace", "one.csv"), "is of 1 workers, and the job has 2"),
        (("--cluster", "none.csv"), "--cluster = 'none.csv': cannot be read"),
        (("--measured", "none.json"), "--measured = 'none.json': cannot be read"),
        (("--measured", "job.yaml"), "plan.json is not a plan"),
        (("--measured", "meant.json"), "is for the nodes that nodes.csv describes"),
        (("--weak",), "--weak = '': makes the batch grow with numbers of nodes"),
        (("--faults-per-day", "1e12"), "--faults-per-day = 1000000000000.0: is more than one a"),
        (("--trace", "long.csv"), "--trace = 'long.csv': is no CSV: field larger"),
        (("--trace", "huge.json"), "huge.json: data[0] = "),
        (("--start-s", "-1"), "--start-s = -1.0: is no number of 0 or more"),
        (("--faults-per-day", "nan"), "--faults-per-day = nan: is no number of 0 or more"),
        (("--set", "elastic.min_workers=2", "--nodes", "0"), "--nodes = 0: is no number of nodes"),
    ],
)
def test_what_is_wrong_is_refused_with_a_remedy(words: tuple[str, ...], says: str) -> None:
    code, _, error = simulate(*words)
    assert code == 2, error
    assert says in error
    assert "hint: " in error
