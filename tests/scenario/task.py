"""What is trained, and what a single process makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raycloud.spec import Job
from tests.lockstep import NetTask, job, plain_loop
from tests.scenario.stage import here

_BUILD_S = (0.5, 4.0)


class StagedTask(NetTask):
    """Takes virtual time wherever it is called by a member, where something may befall that.

    Where members do not begin `alike`, those on other machines than the first begin otherwise.
    """

    def __init__(self, *, norm: bool, alike: bool = True) -> None:
        super().__init__(norm=norm)
        self.alike = alike

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
        return super().loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: _pass_by("commit"))
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60, eta_min=1e-4)


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
) -> Job:
    """The job that all scenarios train."""
    return job(
        task=StagedTask,
        settings={"norm": norm, "alike": alike},
        steps=steps,
        elastic={"min_workers": least, "max_workers": members, "shares": shares},
        checkpoint={"every_steps": every_steps, "keep": 2},
    )


@cache
def undisturbed(*, norm: bool, steps: int) -> dict[str, Tensor]:
    """Parameters and buffers of a single process that nothing befalls."""
    alone = asked(norm=norm, steps=steps)
    return dict(plain_loop(alone, StagedTask(norm=norm), steps).state_dict())


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference between any two entries."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in wanted.items())


def same_steps(names: Sequence[str]) -> list[str]:
    """The names of a state that only a commit changes; a forward pass has others in its hands."""
    return [name for name in names if "running_" not in name and "num_batches" not in name]
