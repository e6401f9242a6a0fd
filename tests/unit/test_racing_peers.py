"""The peers on the testbed: command lines, environments, order of the samples, checkpoints."""

import argparse
import doctest
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from benchmarks import journal
from benchmarks.peers import checkpoints, dense, environments, torchrun_elastic
from benchmarks.peers import course as course_module
from benchmarks.peers.checkpoints import Progress
from benchmarks.peers.course import Course, add_course, parse, place
from benchmarks.peers.environments import HIVEMIND, NotInstalledError, Peer, interpreter
from benchmarks.racing.contestant import Attempt, environment
from benchmarks.racing.ray_contestants import RayTrain, RayTrainTorchft
from benchmarks.racing.torch_contestants import agent
from benchmarks.workload import CLIP_NORM, Stream, build_model, build_optimizer, loss_of
from raycloud.spec.sizes import bucket_bytes

pytestmark = pytest.mark.unit


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(
        directory=tmp_path / "attempt",
        nodes=("n1", "n2"),
        most_nodes=4,
        global_batch=8,
        per_worker=4,
        learning_rate=5e-4,
        elastic=True,
        ray_address="10.77.0.10:6379",
        small=True,
    )


def test_shares_that_do_not_add_up_are_refused(attempt):
    with pytest.raises(ValueError, match="per_worker=3 of 2 nodes is not global_batch=8"):
        replace(attempt, per_worker=3)
    with pytest.raises(ValueError, match="most_nodes=1"):
        replace(attempt, most_nodes=1)


def test_a_node_keeps_its_place_and_a_new_one_has_that_of_its_number(attempt):
    assert [attempt.place_of(node) for node in ("n1", "n2", "n3", "n4")] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="n3 to n4"):
        attempt.place_of("n5")
    with pytest.raises(ValueError, match="n3 to n4"):
        attempt.place_of("spot")


def test_the_command_line_says_the_whole_course(attempt):
    parser = argparse.ArgumentParser()
    add_course(parser)
    for course in (attempt.course(), replace(attempt, elastic=False, small=False).course()):
        assert parse(parser.parse_args(course.arguments())) == course


def test_checkpoints_are_for_attempts_with_faults(attempt):
    assert attempt.course().checkpoints == attempt.checkpoints
    assert replace(attempt, elastic=False).course().checkpoints is None


def test_processes_get_nothing_of_the_callers_tuning(attempt, monkeypatch):
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "RAY_AUTH_TOKEN", "TORCH_LOGS"):
        monkeypatch.setenv(name, "9")
    made = environment(attempt)
    assert made["OMP_NUM_THREADS"] == "1"
    assert made.keys().isdisjoint({"LD_PRELOAD", "RAY_AUTH_TOKEN", "TORCH_LOGS"})
    assert Path(made["TMPDIR"]).is_dir()
    assert attempt.logs.is_dir()


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_torchrun_takes_as_many_nodes_as_there_may_be_only_where_faults_are_to_come(attempt):
    elastic = agent(attempt, store="10.77.0.10", address="10.77.0.11")
    fixed = agent(replace(attempt, elastic=False), store="10.77.0.10", address="10.77.0.11")
    assert (option(elastic, "--nnodes"), option(fixed, "--nnodes")) == ("1:4", "2:2")
    assert (option(elastic, "--max-restarts"), option(fixed, "--max-restarts")) == ("1000", "0")
    assert option(elastic, "--local-addr") == "10.77.0.11"
    assert "is_host=0" in option(elastic, "--rdzv-conf")


@pytest.mark.parametrize(("hook", "bucket_mb"), [("none", 1), ("fp16", 1), ("powersgd", 64)])
def test_buckets_are_as_large_as_raycloud_s_messages_but_powersgd_has_one(
    hook, bucket_mb, monkeypatch
):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a process group sets its own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torchrun_elastic.wrap(build_model(small=True), hook=hook, elastic=False)
        assert model.bucket_bytes_cap == bucket_mb * 2**20
    finally:
        dist.destroy_process_group()
    size = sum(p.numel() * p.element_size() for p in build_model().parameters())
    assert bucket_bytes(size) == dense.BUCKET_MB * 2**20


def test_ray_train_is_fixed_or_elastic(attempt):
    fixed = RayTrain("ray-train", elastic=False).command(attempt)
    elastic = RayTrain("ray-train-elastic", elastic=True).command(attempt)
    assert "--most" not in fixed
    assert option(fixed, "--workers") == "2"
    assert option(elastic, "--most") == "4"
    with pytest.raises(ValueError, match="ray_address"):
        RayTrain("ray-train", elastic=False).command(replace(attempt, ray_address=None))
    torchft = RayTrainTorchft("ray-train-torchft").command(attempt)
    assert "benchmarks.peers.ray_train_torchft" in torchft
    assert Path(option(torchft, "--packages")).name == "site-packages"


def test_the_examples_of_a_course_are_true():
    found = doctest.testmod(course_module)
    assert found.attempted > 0
    assert found.failed == 0


def test_workers_take_every_sample_once_and_in_order_whatever_the_world():
    samples, taken = 0, []
    for world in (4, 4, 3, 1, 2):
        places = [place(samples=samples, world=world, rank=r, per_worker=16) for r in range(world)]
        for first, after in places:
            taken += range(first, first + 16)
            assert after == samples + 16 * world
        samples = places[0][1]
    assert taken == list(range(samples))


class EnoughError(Exception):
    """Ends a loop that nobody ends."""


def course_of(directory: Path) -> Course:
    return Course(
        journals=directory / "journals",
        snapshots=directory / "snapshots",
        checkpoints=directory / "checkpoints",
        per_worker=2,
        learning_rate=1e-3,
        small=True,
    )


def train(course: Course, updates: int, restored: Progress | None = None) -> torch.nn.Module:
    """Train as the only worker until `updates`; from a checkpoint, if there is one."""
    trained = []

    def after(model, optimizer, progress):
        checkpoints.keep(course.checkpoints, model, {"optimizer": optimizer}, progress)
        if progress.update == updates:
            trained.append(model)
            raise EnoughError

    def restore(model, optimizer):
        update = checkpoints.newest(course.checkpoints)
        if update is None:
            return Progress()
        path = checkpoints.path_of(course.checkpoints, update)
        found = checkpoints.read(path, model, {"optimizer": optimizer})
        assert found == restored
        return found

    one = dense.Dense(
        course=course, rank=0, world=1, wrap=lambda m: m, after=after, restore=restore
    )
    with pytest.raises(EnoughError):
        dense.train(one)
    return trained[0]


@pytest.fixture
def short_text(monkeypatch):
    """The text is read once: the loop is what is tested."""
    text = torch.arange(40_000).remainder(251).to(torch.uint8).numpy()
    monkeypatch.setattr("benchmarks.peers.course.load_text", lambda: text)
    return text


def test_the_loop_notes_what_it_did_and_trains_as_one_process_would(tmp_path, short_text):
    threads = torch.get_num_threads()
    course = course_of(tmp_path)
    model = train(course, 5)
    torch.set_num_threads(threads)
    alone = build_model(small=True)
    optimizer = build_optimizer(alone, learning_rate=course.learning_rate)
    stream = Stream(short_text)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(alone, stream.batch(step * 2, 2)).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP_NORM)
        optimizer.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    (worker,) = journal.read(course.journals)
    assert [(note.update, note.samples) for note in worker.notes] == [(n, 2) for n in range(1, 6)]
    assert [update for update, _ in journal.snapshots(course.snapshots)] == [5]


def test_a_restart_goes_on_from_the_checkpoint_to_the_same_parameters(tmp_path, short_text):
    threads = torch.get_num_threads()
    whole = train(course_of(tmp_path / "whole"), 6)
    course = course_of(tmp_path / "parts")
    train(course, 4)
    resumed = train(course, 6, restored=Progress(update=4, samples=8))
    torch.set_num_threads(threads)
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert sorted(path.name for path in course.checkpoints.iterdir()) == [
        "00000005.safetensors",
        "00000006.safetensors",
    ]


def test_a_checkpoint_holds_each_optimizer_apart(tmp_path):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    outer.step()
    optimizers = {"inner": inner, "outer": outer}
    checkpoints.keep(tmp_path, model, optimizers, Progress(update=3, samples=96))
    other = torch.nn.Linear(2, 2)
    found = {
        "inner": torch.optim.AdamW(other.parameters()),
        "outer": torch.optim.SGD(other.parameters(), momentum=0.9),
    }
    path = checkpoints.path_of(tmp_path, 3)
    assert checkpoints.read(path, other, found) == Progress(update=3, samples=96)
    assert torch.equal(other.weight, model.weight)
    moments = found["inner"].state[other.weight]["exp_avg"]
    assert torch.equal(moments, inner.state[model.weight]["exp_avg"])
    momentum = found["outer"].state[other.bias]["momentum_buffer"]
    assert torch.equal(momentum, outer.state[model.bias]["momentum_buffer"])


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
    peer = Peer(name="json", version="0")
    with pytest.raises(NotInstalledError):
        interpreter(Peer(name="no such package!", version="0", takes=()), tmp_path)
    place = environments.place_of(peer, tmp_path)
    place.mkdir()
    (place / "ready").touch()
    assert interpreter(peer, tmp_path) == place / "bin" / "python"


def test_what_is_installed_is_pinned():
    assert all("==" in one for one in HIVEMIND.requirements)


def test_a_supervised_command_is_started_again_until_it_ends_well(tmp_path):
    count = tmp_path / "count"
    script = (
        "import pathlib, sys\n"
        f"path = pathlib.Path({str(count)!r})\n"
        "times = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(times))\n"
        "sys.exit(0 if times == 3 else 7)\n"
    )
    supervised = [sys.executable, "-m", "benchmarks.peers.supervised", "--restarts"]
    command = ["--", sys.executable, "-c", script]
    failed = subprocess.run([*supervised, "0", *command], check=False, stdout=subprocess.DEVNULL)
    assert (failed.returncode, count.read_text()) == (1, "1")
    done = subprocess.run([*supervised, "5", *command], check=False, stdout=subprocess.DEVNULL)
    assert (done.returncode, count.read_text()) == (0, "3")
