"""The scripts of the cluster guide, run as they stand, each in a machine of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from raycloud.report.summary import of_run
from tests.live import ROOT, exact_steps
from tests.namespaces import inside, missing, variables

EXAMPLES = ROOT / "docs/examples"
WAIT_S = 240.0  # below the time at which pytest gives up on a test that hangs

pytestmark = [
    pytest.mark.timeout(WAIT_S + 40),
    pytest.mark.skipif(bool(missing()), reason=f"no machine within this one: {missing()}"),
]

TASK = """
import torch

from raycloud import Splits, Task


class Line(Task):
    def model(self):
        return torch.nn.Linear(4, 1)

    def data(self, path):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return Splits(train=rows, held_out=rows)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""

JOB = """
task: line.py:Line
steps: 6
global_batch: 8
micro_batch: 4
elastic: {max_workers: 2}
"""

BARE = """
set -eu
sh {examples}/head.sh
sh {examples}/node.sh 127.0.0.1
export RAY_AUTH_MODE=token
raycloud train line.yaml --run-dir run --address 127.0.0.1:6379 --set elastic.shares=equal
python -c '{nodes}'
ray stop --grace-period 5
"""

# What the nodes say of themselves once both scripts have run.
NODES = (
    'import json, ray; ray.init(address="127.0.0.1:6379", logging_level="ERROR");'
    'print("nodes", json.dumps([n["Labels"] for n in ray.nodes() if n["Alive"]]))'
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(JOB)
    (tmp_path / "home").mkdir()
    return tmp_path


def ran(project: Path, ray_tmpdir: Path, *arguments: object, **more: str) -> str:
    """What a command said that ended well."""
    with (project / "said").open("wb") as said:
        code = subprocess.run(
            inside(*arguments),
            cwd=project,
            env=variables(project / "home", ray_tmpdir) | more,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=WAIT_S,
        ).returncode
    text = (project / "said").read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


@pytest.mark.full(only="the example of a bare `ray start`")
def test_bare_ray_start(project: Path, ray_tmpdir: Path) -> None:
    said = ran(project, ray_tmpdir, "sh", "-c", BARE.format(examples=EXAMPLES, nodes=NODES))
    assert exact_steps(project / "run") == 6
    assert of_run(project / "run").workers == 2
    (line,) = [line for line in said.splitlines() if line.startswith("nodes ")]
    labels = json.loads(line.removeprefix("nodes "))
    assert sorted(node["ray.io/market-type"] for node in labels) == ["on-demand", "spot"]
    assert sorted(node["raycloud.io/price-per-hour"] for node in labels) == ["0.20", "0.48"]
    token = project / "home/.ray/auth_token"
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.full(only="the example for Slurm")
def test_slurm_with_symmetric_run(project: Path, ray_tmpdir: Path) -> None:
    """Slurm itself is not here: `srun` and `scontrol` stand for those of one node."""
    commands = project / "commands"
    commands.mkdir()
    for name, text in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    environment = variables(project / "home", ray_tmpdir)
    said = ran(
        project, ray_tmpdir,
        "sh", "-c", f"ray get-auth-token --generate; sh {EXAMPLES}/slurm.sh line.yaml run",
        PATH=f"{commands}:{environment['PATH']}",
        SLURM_JOB_NODELIST="node1", SLURM_JOB_NUM_NODES="1", SLURM_CPUS_ON_NODE="2",
    )  # fmt: skip
    assert "run finished: 6 steps" in said
    assert exact_steps(project / "run") == 6
