"""What the task's code changes beside the optimizer: as a plain loop has it, noted, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from raycloud.errors import TaskError
from raycloud.order import Position
from raycloud.step.stateful import Commit
from tests.lockstep import Fleet, difference, job, plain_loop
from tests.looped import looped
from tests.nets import BuiltTask, Counting

SHARES = [(8,), (5, 3), (8, 0), (3, 3, 2)]
EXACT = 1e-12


def tried(build: Callable[[], nn.Module], **settings: Any) -> Fleet:
    return Fleet(job(), BuiltTask(build, **settings), (8,))


class Looking(nn.Module):
    """Looks up rows of a table that limits their norm."""

    def __init__(self, *, bag: bool = False, trained: bool = True, from_pass: int = 0) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table = kind(20, 8, max_norm=1.0)
        self.table.weight.requires_grad_(trained)
        self.last, self.left = nn.Linear(8, 3), from_pass

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        ids = (x.abs() * 10).long().clamp(max=19)[:, :2]
        found = x.new_zeros(len(x), 8) if self.left >= 0 else self.table(ids)
        out: Tensor = self.last(found if found.dim() == 2 else found.mean(1))
        return out


class Teaching(nn.Module):
    """A student, and a teacher that follows it: in the forward pass, or after each step."""

    def __init__(self, *, how: str = "hook", from_pass: int = 0) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.how, self.left = how, from_pass

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mine, theirs in pairs:
            match self.how:
                case "data":
                    mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
                case "assigned":
                    mine.data = mine.data * 0.9 + theirs.data * 0.1
                case _:
                    mine.mul_(0.9).add_(theirs, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.how != "hook" and self.left < 0:
            self.follow()
        with torch.no_grad():
            taught = self.teacher(x)
        out: Tensor = self.head(self.student(x) - 0.5 * taught)
        return out


class TeachingTask(BuiltTask):
    """Lets the teacher follow in a hook of the optimizer."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        assert isinstance(model, Teaching)
        optimizer.register_step_post_hook(lambda *_: model.follow())
        return optimizer


class Averaged(nn.Module):
    """A network with batch statistics, and the average of its parameters and buffers over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.mean = AveragedModel(self.net)
        self.last = AveragedModel(self.net, avg_fn=lambda _mean, new, _n: new)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class AveragedTask(BuiltTask):
    """Averages in a hook of the optimizer."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Averaged)
        optimizer = torch.optim.AdamW(model.net.parameters(), lr=3e-3)

        def average(*_: Any) -> None:
            model.mean.update_parameters(model.net)
            model.last.update_parameters(model.net)

        optimizer.register_step_post_hook(average)
        return optimizer


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bag", [True, False])
def test_a_table_that_limits_its_rows_is_refused(bag: bool, trained: bool) -> None:
    with pytest.raises(TaskError, match=r"Embedding(Bag)? 'table' has max_norm") as refused:
        tried(lambda: Looking(bag=bag, trained=trained))
    assert "register_step_post_hook" in refused.value.hint


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
def test_a_frozen_parameter_that_a_pass_changes_is_refused(how: str) -> None:
    with pytest.raises(TaskError, match=r"changes the frozen parameter 'teacher\.") as refused:
        tried(lambda: Teaching(how=how))
    assert "register_step_post_hook" in refused.value.hint


@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_a_trained_parameter_that_a_pass_changes_is_refused(how: str) -> None:
    class Starts(nn.Linear):
        """Takes its first values from the first data, as some normalisations do."""

        def forward(self, x: Tensor) -> Tensor:
            if how == "replaced":
                self.bias = nn.Parameter(x.detach().mean(0)[:3])
            elif how == "data":
                self.bias.data.copy_(x[0, :3])
            else:
                with torch.no_grad():
                    self.bias.copy_(x[0, :3])
            return super().forward(x)

    with pytest.raises(TaskError, match="changes the trained parameter 'bias'"):
        tried(lambda: Starts(6, 3))


@pytest.mark.parametrize("shares", [(8,), (5, 3)], ids=str)
@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Teaching(how="in place", from_pass=4), r"frozen parameter 'teacher\.weight'"),
        (lambda: Looking(from_pass=4), "Embedding 'table' has max_norm"),
    ],
    ids=["teacher", "table"],
)
def test_what_begins_later_is_refused_in_that_step(
    build: Callable[[], nn.Module], named: str, shares: tuple[int, ...]
) -> None:
    fleet = Fleet(job(), BuiltTask(build), shares)
    with pytest.raises(TaskError, match=named):
        fleet.step(0)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(
    "task", [TeachingTask(Teaching), AveragedTask(Averaged)], ids=["teacher", "average"]
)
def test_what_a_hook_of_the_optimizer_changes_is_exact(
    task: BuiltTask, shares: tuple[int, ...]
) -> None:
    asked = job()
    fleet = Fleet(asked, task, shares)
    for step in range(7):
        if step == 4 and len(shares) == 3:
            fleet.lose(1, step, during="gradients")
        else:
            fleet.step(step)
    alone = plain_loop(asked, task, 7)
    for replica in fleet.replicas:
        assert replica.statistics.changing == ()
        assert difference(replica.model, alone) <= EXACT
    first = fleet.replicas[0]
    taken = Fleet(asked, task, (8,)).replicas[0]  # as after a hand-over, or from a checkpoint
    tensors = {name: t.clone() for name, t in first.state.tensors().items()}
    taken.state.load(tensors, first.state.values())
    fleet.join([taken], (8,))
    for step in range(7, 10):
        fleet.step(step)
    assert difference(taken.model, plain_loop(asked, task, 10)) <= EXACT


class Backwards(BuiltTask):
    """Makes gradients of its own from some pass on."""

    def __init__(self, *, from_pass: int = 0, assigns: bool = False) -> None:
        super().__init__(lambda: nn.Linear(6, 3))
        self.left, self.assigns = from_pass, assigns

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
            if self.assigns:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            else:
                penalty.backward()  # type: ignore[no-untyped-call]
        return super().loss(model, batch)


@pytest.mark.parametrize("assigns", [True, False])
def test_a_gradient_that_the_loss_makes_itself_is_refused_before_the_first_step(
    assigns: bool,
) -> None:
    with pytest.raises(TaskError, match=r"Task\.loss made a gradient of '\w+' itself") as refused:
        Fleet(job(), Backwards(assigns=assigns), (8,))
    assert "without backward()" in refused.value.hint


def test_one_that_it_makes_later_is_refused_in_that_pass() -> None:
    fleet = Fleet(job(), Backwards(from_pass=3), (5, 3))
    with pytest.raises(TaskError, match=r"Task\.loss made a gradient of '\w+' itself"):
        fleet.step(0)


def test_gradients_that_are_none_of_the_parameters_are_allowed() -> None:
    class Penalty(BuiltTask):
        """A penalty on gradients, as `torch.autograd.grad` makes it."""

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            points = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(points).square().sum(), points, create_graph=True)
            return super().loss(model, batch) + 0.1 * slope.square().mean()

    asked, task = job(), Penalty(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    fleet = Fleet(asked, task, (5, 3))
    for step in range(4):
        fleet.step(step)
    assert difference(fleet.replicas[0].model, plain_loop(asked, task, 4)) <= EXACT


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


class Remembering(nn.Module):
    """Keeps something of each pass in a buffer of some type."""

    kept: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        first = torch.zeros(6, dtype=dtype)
        if dtype == torch.int64:
            first += 2**60 + 1
        self.register_buffer("kept", first)
        self.register_buffer("mask", torch.full((3,), -torch.inf))  # infinite, and it changes
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dtype = self.kept.dtype
        if dtype.is_complex:
            self.kept.mul_(0.5).add_(torch.complex(mean, 2 * mean).to(dtype))
        elif dtype.is_floating_point:
            self.kept.mul_(0.5).add_(mean.to(dtype))
        elif dtype == torch.bool:
            self.kept |= mean > 0.5
        else:
            self.kept += 2
        self.mask.fill_(torch.inf)
        out: Tensor = self.layer(x)
        return out


class KeepsTypes(BuiltTask):
    """As it is built."""

    def model(self) -> nn.Module:
        return self.build()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_of_every_type_are_averaged_as_what_they_are(dtype: torch.dtype) -> None:
    asked, task = job(), KeepsTypes(lambda: Remembering(dtype))
    alone = Fleet(asked, task, (8,))
    for step in range(3):
        alone.step(step)
    plain = plain_loop(asked, task, 3).get_buffer("kept")
    assert torch.equal(alone.replicas[0].model.get_buffer("kept"), plain)
    assert bool(plain.any())
    idle = Fleet(asked, task, (8, 0))  # who computes nothing adds nothing
    several = Fleet(asked, task, (6, 2))
    works = several.compute(0)
    own = [r.model.get_buffer("kept").clone() for r in several.replicas]
    idle.compute(0)
    for fleet, made in ((several, works), (idle, None)):
        for replica in fleet.replicas:
            replica.statistics.collect(lambda: False)
            replica.statistics.commit(Commit(step=0, count=8))
        kept = [r.model.get_buffer("kept") for r in fleet.replicas]
        assert torch.equal(*kept)
        assert all(bool((r.model.get_buffer("mask") == torch.inf).all()) for r in fleet.replicas)
        if made is None:
            continue
        share = made[0].weight / (made[0].weight + made[1].weight)
        if dtype.is_floating_point or dtype.is_complex:
            torch.testing.assert_close(kept[0], own[0] * share + own[1] * (1 - share))
        elif dtype != torch.bool:
            start = Remembering(dtype).kept
            mean = (own[0] - start).double() * share + (own[1] - start).double() * (1 - share)
            assert torch.equal(kept[0], start + mean.round().to(dtype))


class Positions(nn.Module):
    """Keeps positions for the longest input so far, and a mask made anew in each pass."""

    def __init__(self, *, in_place: bool = False, lazy: bool = False) -> None:
        super().__init__()
        self.layer, self.in_place, self.most = nn.Linear(6, 3), in_place, 1
        self.register_buffer("cache", None if lazy else self.made(1), persistent=False)
        self.register_buffer("mask", torch.zeros(6), persistent=False)

    def made(self, count: int) -> Tensor:
        return torch.linspace(0.0, 1.0, 100)[:count].double()

    def forward(self, x: Tensor) -> Tensor:
        count = 1 + int(x.abs().sum() * 10) % 97
        if self.cache is None or count > self.most:  # of which the module knows more than its size
            self.register_buffer("cache", self.made(count), persistent=False)
            self.most = count
        mask = (x.detach()[0] > 0).to(self.mask.dtype)
        if self.in_place:
            self.mask.copy_(mask)
        else:
            self.mask = mask
        assert isinstance(self.cache, Tensor)
        out: Tensor = self.layer(x * self.mask) + self.cache[:count].sum()
        return out


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("lazy", [True, False])
def test_caches_are_no_state(lazy: bool, in_place: bool, shares: tuple[int, ...]) -> None:
    asked = job()
    task = BuiltTask(lambda: Positions(in_place=in_place, lazy=lazy))
    fleet = Fleet(asked, task, shares)
    told: list[str] = []
    for replica in fleet.replicas:
        assert replica.statistics.changing == ()
        assert replica.fuse > 1
        replica.notice = lambda what, _: told.append(what)
    for step in range(6):
        fleet.step(step)
    for replica in fleet.replicas:
        assert difference(replica.model, plain_loop(asked, task, 6)) <= EXACT
    assert told == []


class Carrying(nn.Module):
    """A buffer that is not persistent, and yet carries something from pass to pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 3), how
        self.register_buffer("before", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - 0.1 * self.before)
        if self.how == "mean":
            self.before.mul_(0.9).add_(0.1 * x.detach().mean(0))
        elif self.how == "last":
            self.before = x.detach().mean(0)
        return out


@pytest.mark.parametrize("how", ["mean", "last"])
def test_what_is_not_persistent_and_carries_something_is_averaged(how: str) -> None:
    asked, task = job(), BuiltTask(lambda: Carrying(how))
    fleet = Fleet(asked, task, (8,))
    assert fleet.replicas[0].statistics.changing == ("before",)
    for step in range(4):
        fleet.step(step)
    assert difference(fleet.replicas[0].model, plain_loop(asked, task, 4)) <= EXACT
    both = Fleet(asked, task, (5, 3))
    both.step(0)
    assert torch.equal(*(r.model.get_buffer("before") for r in both.replicas))


def test_what_is_not_persistent_and_begins_late_is_told() -> None:
    class Late(Carrying):
        def __init__(self) -> None:
            super().__init__("nothing")

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.how = "mean"
            return out

    fleet = Fleet(job(), BuiltTask(Late), (8,))
    told: list[Any] = []
    fleet.replicas[0].notice = lambda what, detail: told.append((what, detail))
    for step in range(2):
        fleet.step(step)
    [(what, detail)] = told
    assert "each replica keeps for itself" in what
    assert detail == {"buffers": ["before"]}


@pytest.mark.parametrize("how", ["resized", "replaced", "made", "lazy"])
def test_state_that_gets_another_size_is_refused(how: str) -> None:
    class Grows(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            if how != "made":
                self.register_buffer("kept", None if how == "lazy" else torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            if how == "resized":
                self.kept.resize_(6).fill_(1.0)
            elif how == "made":
                self.register_buffer("kept", x.detach())
            else:
                self.kept = x.detach()
            return super().forward(x)

    with pytest.raises(TaskError, match="buffer 'kept'") as refused:
        tried(Grows)
    assert "persistent=False" in refused.value.hint


def test_a_checkpoint_that_is_loaded_first_changes_no_buffer() -> None:
    asked, task = job(), BuiltTask(Counting)
    first, second = (Fleet(asked, task, (8,)).replicas[0] for _ in range(2))
    fleet = Fleet(asked, task, (8,))
    replica = fleet.replicas[0]
    del first
    replica.state.load(second.state.tensors(), second.state.values())
    replica.try_out(fleet.collate.one(fleet.span(0, Position()).micro_batches[0]))
    assert replica.statistics.changing == ("seen", "passes")  # `table` is not among them


@pytest.mark.parametrize("shares", [(8,), (5, 3)], ids=str)
@pytest.mark.parametrize("replaced", [True, False])
def test_a_buffer_that_begins_to_change_late_is_averaged_from_then_on(
    tmp_path: Path, replaced: bool, shares: tuple[int, ...]
) -> None:
    """Passes that fuse several micro-batches, and a member without one, among them."""
    asked, steps = job(), 6

    def task() -> BuiltTask:
        return BuiltTask(lambda: Counting(after=4, replaced=replaced), dropout=0.0)

    members = looped(tmp_path, asked, task, shares, steps)
    told = [what for member in members for what in member.notices()]
    assert told
    assert set(told) == {"buffers averaged over replicas from now on, not exact"}
    tensors = [member.replica.state.tensors() for member in members]
    assert all(torch.equal(t, tensors[-1][name]) for name, t in tensors[0].items())
    trained = plain_loop(asked, task(), steps)
    for member in members:
        assert member.replica.fuse == 1
        assert member.replica.statistics.changing == ("seen", "passes")
        assert not member.replica.statistics.begun
        for name, parameter in member.replica.model.named_parameters():
            torch.testing.assert_close(parameter, trained.get_parameter(name), rtol=0, atol=EXACT)


def test_a_late_buffer_of_one_member_is_as_in_a_plain_loop(tmp_path: Path) -> None:
    """From which pass on is counted by the passes that count, as everything is."""

    class Begins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if self.passes > 20:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            out: Tensor = self.layer(x - self.mean)
            return out

    asked = job()
    for shares in ((8,), (4, 4)):
        members = looped(tmp_path, asked, lambda: BuiltTask(Begins), shares, 7)
        models = [member.replica.model for member in members]
        if len(shares) == 1:
            assert difference(models[0], plain_loop(asked, BuiltTask(Begins), 7)) <= EXACT
        else:
            assert difference(*models) == 0.0
            assert float(models[0].get_buffer("mean").abs().max()) > 0


class Spectral(nn.Module):
    """Old and new normalisations of weights, which iterate in each forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        first = nn.Linear(6, 3)
        old = nn.utils
        if kind == "spectral_norm":
            self.layer: nn.Module = old.spectral_norm(first)
        elif kind == "parametrized spectral_norm":
            self.layer = old.parametrizations.spectral_norm(first)
        elif kind == "parametrized weight_norm":
            self.layer = old.parametrizations.weight_norm(first)
        elif kind == "orthogonal":
            self.layer = old.parametrizations.orthogonal(first)
        else:
            self.layer = nn.Sequential(first, nn.Unflatten(1, (3, 1)), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    ("kind", "changing"),
    [
        ("spectral_norm", ("layer.weight_u", "layer.weight_v")),
        (
            "parametrized spectral_norm",
            ("layer.parametrizations.weight.0._u", "layer.parametrizations.weight.0._v"),
        ),
        ("parametrized weight_norm", ()),
        ("orthogonal", ()),
    ],
)
def test_normalised_weights_are_exact_or_told(kind: str, changing: tuple[str, ...]) -> None:
    asked, task = job(), BuiltTask(lambda: Spectral(kind))
    alone, both = Fleet(asked, task, (8,)), Fleet(asked, task, (5, 3))
    assert alone.replicas[0].statistics.changing == changing
    for step in range(4):
        alone.step(step)
        both.step(step)
    plain = plain_loop(asked, task, 4)
    assert difference(alone.replicas[0].model, plain) <= EXACT
    first, second = (replica.model for replica in both.replicas)
    assert difference(first, second) == 0.0
    assert difference(first, plain) <= (0.05 if changing else EXACT)


def test_instance_statistics_are_averaged_and_told() -> None:
    class Instances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(F.relu(self.norm(x.view(len(x), 2, 3)).flatten(1)))
            return out

    asked, task = job(), BuiltTask(Instances)
    alone, both = Fleet(asked, task, (8,)), Fleet(asked, task, (5, 3))
    names = alone.replicas[0].statistics.changing
    assert names == ("norm.running_mean", "norm.running_var")
    for step in range(4):
        alone.step(step)
        both.step(step)
    assert difference(alone.replicas[0].model, plain_loop(asked, task, 4)) <= EXACT
    assert difference(*(replica.model for replica in both.replicas)) == 0.0
