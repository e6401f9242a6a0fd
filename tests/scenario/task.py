"""What is trained, and what a single process makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raycloud.order import Order, StepSpan
from raycloud.spec import Job
from raycloud.task import Splits
from tests.lockstep import NetTask, job, plain_loop
from tests.scenario.stage import here

_BUILD_S = (0.5, 4.0)
_MARK = 50.0
_LOUD = 1e6


class StagedTask(NetTask):
    """Takes virtual time wherever it is called by a member, where something may befall that.

    Where members do not begin `alike`, those on other machines than the first begin otherwise. The
    loss of the samples `bad` is not finite; or it is, and the update `spoils` a parameter.
    """

    def __init__(
        self,
        *,
        norm: bool,
        alike: bool = True,
        bad: Sequence[int] = (),
        spoils: bool = False,
        double: bool = True,
    ) -> None:
        super().__init__(norm=norm, double=double)
        self.alike, self.bad, self.spoils = alike, tuple(bad), spoils

    def data(self, path: str | None) -> Splits:
        rows: Any = super().data(path).train
        for i in self.bad:
            rows[i][0][1] = _MARK
        return Splits(train=rows)

    def model(self) -> nn.Module:
        strand = here()
        if strand is not None:
            strand.stage.wait(strand.stage.world.between(*_BUILD_S), "build")
        model = super().model()
        if strand is not None and strand.process.node and not self.alike:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(strand.process.node)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        strand = here()
        if strand is not None:
            strand.stage.wait(strand.process.micro_batch_s, "compute")
        found = super().loss(model, batch)
        if not (batch[0][:, 1] == _MARK).any():
            return found
        return found + (_LOUD * _last(model).bias.sum() if self.spoils else float("nan"))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: _pass_by("commit"))
        if self.spoils:
            optimizer.register_step_post_hook(lambda *_: _spoil(model))
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60, eta_min=1e-4)


def _last(model: nn.Module) -> nn.Linear:
    last = model.get_submodule("last")
    assert isinstance(last, nn.Linear)
    return last


def _spoil(model: nn.Module) -> None:
    """As an optimizer does that divides by how far the gradients of a bias are apart."""
    last = _last(model)
    assert last.bias.grad is not None
    if last.bias.grad.std() < 1e-3 * last.bias.grad.abs().mean():
        with torch.no_grad():
            last.weight[0, 0] = float("nan")


def _pass_by(point: str) -> None:
    strand = here()
    if strand is not None:
        strand.stage.pass_by(point)


def asked(
    *,
    norm: bool,
    steps: int,
    alike: bool = True,
    every_steps: int | str | None = None,
    least: int = 1,
    members: int = 1,
    shares: str = "auto",
    bad: Sequence[int] = (),
    spoils: bool = False,
    codec: str = "none",
    topology: str = "auto",
    period: int | str = 1,
    stream: int = 1,
) -> Job:
    """The job that all scenarios train; what a codec may encode is not double."""
    settings = {"norm": norm, "alike": alike, "bad": list(bad), "spoils": spoils}
    return job(
        task=StagedTask,
        settings={**settings, "double": codec == "none"},
        sync={
            "codec": codec,
            "ratio": 8 if codec == "topk" else None,
            "topology": "direct" if topology == "auto" and codec != "none" else topology,
            "period": period,
            "stream": stream,
            "outer": "mean" if period == 1 else "nesterov",
            "bucket_bytes": 1024,
        },
        errors={"on_nan": "rollback", "most_skipped": 99} if bad else {},
        steps=steps,
        elastic={"min_workers": least, "max_workers": members, "shares": shares},
        checkpoint={"every_steps": every_steps, "keep": 2},
    )


@cache
def undisturbed(
    *, norm: bool, steps: int, bad: tuple[int, ...] = (), double: bool = True
) -> dict[str, Tensor]:
    """Parameters and buffers of a single process that nothing befalls, and without `bad` steps."""
    alone, task = asked(norm=norm, steps=steps), StagedTask(norm=norm, bad=bad, double=double)

    def passed_over(span: StepSpan) -> bool:
        return bool(bad_in(alone, span, bad))

    return dict(plain_loop(alone, task, steps, passed_over=passed_over).state_dict())


def bad_in(job: Job, span: StepSpan, bad: Sequence[int]) -> set[int]:
    """Which of these samples a step takes."""
    order = Order(samples=StagedTask(norm=False).samples, seed=job.seed)
    taken = {int(i) for m in span.micro_batches for i in order.ids(m.epoch, m.start, m.stop)}
    return taken & set(bad)


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference between any two entries."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in wanted.items())


def same_steps(names: Sequence[str]) -> list[str]:
    """The names of a state that only a commit changes; a forward pass has others in its hands."""
    return [name for name in names if "running_" not in name and "num_batches" not in name]
