"""Optimizers without torch's compiler: the same numbers, and who compiles still can."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import hashlib, sys, torch
digests = []
for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    kind = getattr(torch.optim, name)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        schedule.step()
    other = kind(torch.nn.Linear(5, 3).parameters(), lr=0.1)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    other.load_state_dict(optimizer.state_dict())
    assert seen == [True] * 5, seen
    assert torch.is_grad_enabled()
    numbers = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digests.append(hashlib.sha256(numbers + str(other.state_dict()).encode()).hexdigest())
print(*digests, "torch._dynamo" in sys.modules)
"""

COMPILED = """
import sys, torch
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
assert "torch._dynamo" not in sys.modules
doubled = torch.compile(lambda x: 2 * x, backend="eager")
assert doubled(torch.ones(3)).sum() == 6
before = model.weight.detach().clone()
model(torch.ones(4, 5)).square().sum().backward()
optimizer.step()
print((before != model.weight).any().item(), "torch._dynamo" in sys.modules)
"""

WITHOUT = "from raycloud.step.update import without_compiler; without_compiler()"


def fresh(code: str) -> list[list[str]]:
    """The words of each line that a new Python prints for `code`."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


@pytest.mark.timeout(180)
def test_the_same_numbers_and_no_compiler_is_loaded() -> None:
    [[*plain, loaded]] = fresh(STEPS)
    [[*found, still]] = fresh(WITHOUT + STEPS)
    assert (found, len(found)) == (plain, 6)
    assert (loaded, still) == ("True", "False")


@pytest.mark.timeout(180)  # the compiler is loaded
@pytest.mark.full
def test_who_compiles_still_can() -> None:
    [found] = fresh(WITHOUT + COMPILED)
    assert found == ["True", "True"]
