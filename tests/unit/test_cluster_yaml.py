"""cluster.yaml and the examples of the cluster guide, against what Ray and raycloud ask of them."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray._private.label_utils import validate_node_label_syntax
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command

from raycloud.planner.inventory import Node
from raycloud.spec import load_job
from tests.live import ran

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
GUIDE = ROOT / "docs/clusters.md"
PRICE = "raycloud.io/price-per-hour"
AUTOSCALER = Path(ray.__file__).with_name("autoscaler")
# Quantities of Kubernetes: a number, and a unit.
QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|[KMGT]i?)?")


def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def schema() -> dict[str, Any]:
    return json.loads((AUTOSCALER / "ray-schema.json").read_text())


def rayjob() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())


def nodes() -> dict[str, Node]:
    """One machine of each type, as it would join."""
    return {
        name: Node(
            name=name,
            cpus=kind["resources"].get("CPU", 0),
            gpus=kind["resources"].get("GPU", 0),
            labels=kind["labels"],
        )
        for name, kind in cluster()["available_node_types"].items()
    }


def options(command: str) -> set[str]:
    return {name for option in ray_command.commands[command].params for name in option.opts}


def used(command: list[str]) -> list[str]:
    """The long options in a command's words."""
    return [word.partition("=")[0] for word in command if word.startswith("--")]


def ray_starts() -> Iterator[tuple[str, list[str]]]:
    """Every `ray start` there is, as words, with the place it stands in."""
    found = cluster()
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command in found[part]:
            yield part, shlex.split(command)
    for name in ("head.sh", "node.sh"):
        text = (EXAMPLES / name).read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith("ray "):
                yield name, shlex.split(line)


def test_it_is_valid_against_the_schema_of_ray() -> None:
    jsonschema.validate(cluster(), schema())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cluster_nam",), "x"),
        (("available_node_types", "gpu-spot", "resources", "GPU"), "one"),
        (("available_node_types", "gpu-spot", "labels", PRICE), 0.5),
        (("available_node_types", "gpu-spot", "spot"), True),
    ],
)
def test_the_schema_would_tell(place: tuple[str, ...], value: object) -> None:
    broken: Any = cluster()
    at = broken
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema())


def test_the_autoscaler_takes_it() -> None:
    prepared = prepare_config(copy.deepcopy(cluster()))
    validate_config(prepared)
    kinds = prepared["available_node_types"]
    assert prepared["head_node_type"] == "head"
    most = sum(kind["max_workers"] for name, kind in kinds.items() if name != "head")
    assert prepared["max_workers"] >= most


def test_there_are_a_head_cpus_on_demand_and_gpus_on_the_spot_market() -> None:
    kinds = cluster()["available_node_types"]
    assert set(kinds) == {"head", "cpu-on-demand", "gpu-spot"}
    for name, kind in kinds.items():
        validate_node_label_syntax(kind["labels"])
        assert kind["labels"]["ray.io/node-group"] == name
        assert float(kind["labels"][PRICE]) > 0
        zone = cluster()["provider"]["availability_zone"]
        assert kind["labels"]["ray.io/availability-zone"] == zone
        spot = kind["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        assert kind["labels"]["ray.io/market-type"] == ("spot" if spot else "on-demand")
    assert kinds["head"]["resources"]["CPU"] == 0
    assert kinds["cpu-on-demand"]["labels"]["ray.io/market-type"] == "on-demand"
    assert kinds["gpu-spot"]["labels"]["ray.io/market-type"] == "spot"
    assert kinds["gpu-spot"]["resources"]["GPU"] == 1
    assert kinds["gpu-spot"]["min_workers"] >= 1  # a run uses what is there when it starts


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ({"ray.io/market-type": "spot"}, {"gpu-spot"}),
        ({"ray.io/market-type": "!spot"}, {"head", "cpu-on-demand"}),
        ({"ray.io/accelerator-type": "in(A10G, L4)"}, {"gpu-spot"}),
        ({"ray.io/node-group": "cpu-on-demand"}, {"cpu-on-demand"}),
    ],
)
def test_a_job_selects_its_nodes_by_these_labels(
    selector: dict[str, str], chosen: set[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    labels = json.dumps({"worker": {"labels": selector}})
    job.write_text(f"task: raycloud.metrics:Mean\nsteps: 1\nresources: {labels}\n")
    asked = load_job(job).resources.worker
    assert {name for name, node in nodes().items() if node.carries(asked.labels)} == chosen


def test_every_ray_start_is_one_that_ray_knows() -> None:
    seen = set()
    for place, told in ray_starts():
        words = told[next(at for at, word in enumerate(told) if "=" not in word) :]
        assert words[0] == "ray"
        assert not set(used(words)) - options(words[1]), place
        seen.add((place, words[1]))
    assert {command for _, command in seen} == {"stop", "start", "get-auth-token"}
    symmetric = (EXAMPLES / "slurm.sh").read_text().replace("\\\n", " ")
    (line,) = [line for line in symmetric.splitlines() if line.startswith("srun ")]
    before = shlex.split(line)[: shlex.split(line).index("--")]
    assert before[1:3] == ["ray", "symmetric-run"]
    assert not set(used(before)) - options("symmetric-run") - options("start")
    # What symmetric-run says itself may not be said again.
    assert not {"--head", "--node-ip-address", "--port", "--block"} & set(used(before))


def test_nothing_listens_without_a_token() -> None:
    for place in ("head_start_ray_commands", "worker_start_ray_commands"):
        for command in cluster()[place]:
            assert "ray start" not in command or "RAY_AUTH_MODE=token" in command
    assert cluster()["file_mounts"]["~/.ray/auth_token"]
    for name in ("head.sh", "node.sh", "slurm.sh"):
        assert "export RAY_AUTH_MODE=token" in (EXAMPLES / name).read_text()
    assert rayjob()["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_one_ray_everywhere() -> None:
    texts = [path.read_text() for path in (ROOT / "cluster.yaml", *sorted(EXAMPLES.iterdir()))]
    versions = re.findall(r"rayproject/ray:([\d.]+)-py311", "".join(texts))
    assert len(versions) >= 4
    assert set(versions) == {ray.__version__}
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__


def test_a_node_that_is_cut_off_is_noticed_in_half_a_minute() -> None:
    head = " ".join(cluster()["head_start_ray_commands"])
    told = {name: int(ms) for name, ms in re.findall(r"RAY_health_check_(\w+)=(\d+)", head)}
    beats = told["failure_threshold"]
    assert beats * (told["period_ms"] + told["timeout_ms"]) <= 30_000


def test_the_rayjob_is_what_kuberay_asks_for() -> None:
    job = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    known = {
        "entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished", "rayClusterSpec",
    }  # fmt: skip
    assert set(spec) <= known
    assert spec["submissionMode"] in {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}
    assert spec["ttlSecondsAfterFinished"] >= 0
    assert spec["shutdownAfterJobFinishes"]
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert 0 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (spec["rayClusterSpec"]["headGroupSpec"], workers):
        check_group(group)


def check_group(group: dict[str, Any]) -> None:
    """A group of pods: labels beside its parameters, which are all text; volumes that exist."""
    assert "labels" not in group["rayStartParams"]
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert not {f"--{name}" for name in group["rayStartParams"]} - options("start")
    validate_node_label_syntax(group["labels"])
    assert float(group["labels"][PRICE]) > 0
    pod = group["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked == most  # a pod that may be given less than it thinks computes unevenly
        assert all(isinstance(v, str) and QUANTITY.fullmatch(v) for v in asked.values())


def test_the_entrypoint_is_a_command_of_raycloud() -> None:
    words = shlex.split(rayjob()["spec"]["entrypoint"])
    assert words[:2] == ["raycloud", "train"]
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    job = load_job(ROOT / words[2], overrides=tuple(overrides))
    (workers,) = rayjob()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert job.elastic.max_workers == workers["replicas"]
    (container,) = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert job.resources.worker.gpus <= int(limits["nvidia.com/gpu"])
    assert job.resources.worker.cpus <= int(limits["cpu"])


def test_the_guide_shows_the_files_themselves() -> None:
    page = GUIDE.read_text()
    shown = set(re.findall(r"literalinclude\} (\S+)", page))
    assert {f"examples/{path.name}" for path in EXAMPLES.iterdir()} <= shown
    assert "../cluster.yaml" in shown
    assert all((GUIDE.parent / name).is_file() for name in shown)


def installs() -> Iterator[list[str]]:
    """Each `pip install` of the cluster file, the image and the guides, as its words."""
    texts = ["\n".join(cluster()["setup_commands"])]
    texts += [
        path.read_text().replace("\\\n", " ")
        for path in (
            EXAMPLES / "Dockerfile",
            ROOT / "docs/security.md",
            ROOT / "docs/quickstart.md",
        )
    ]
    for text in texts:
        for line in re.findall(r"^(?:RUN )?pip install (.*)$", text, re.MULTILINE):
            yield shlex.split(line, comments=True)


@pytest.mark.full(only="pip takes what nodes install")
def test_what_nodes_install_can_be_installed(tmp_path: Path) -> None:
    """pip takes no folder beside digests, so that these are two commands; here all is there."""
    found = list(installs())
    assert len(found) >= 6
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index")
    for number, words in enumerate(found):
        assert "-c" not in words
        files = [Path(w).name for before, w in itertools.pairwise(words) if before == "-r"]
        assert all((ROOT / name).is_file() for name in files)
        if files:  # torch with CUDA is not: pip would look for it
            assert files == ["constraints.txt", "constraints-cuda.txt"]
            asked = ("--no-deps", "--require-hashes")
            assert set(asked) <= set(words)
            pins = ("-r", ROOT / "constraints.txt")
            code, one = ran(tmp_path / str(number), *pip, "--dry-run", *asked, *pins)
            assert code == 0, one.err
            assert "Would install" not in one.out
