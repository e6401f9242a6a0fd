"""Settings that the task's constructor does not take, or lacks: told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from raycloud.errors import SpecError
from raycloud.spec import Job
from raycloud.step.contract import check_settings
from tests.lockstep import NetTask


class Needy(NetTask):
    def __init__(self, *, rows: int, width: int = 3, **_: Any) -> None:
        super().__init__()


class Strict(NetTask):
    def __init__(self, *, samples: int = 4) -> None:
        super().__init__(samples=samples)


class Plain(NetTask):
    def __init__(self) -> None:
        super().__init__()


def asked(**settings: Any) -> Job:
    return Job(task="m:T", steps=1, settings=settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message", "hint"),
    [
        (
            Strict,
            {"sample": 3},
            r"settings.sample = 3: Strict.__init__ has none",
            "did you mean samples",
        ),
        (Strict, {"zebra": 3}, r"settings.zebra = 3", "it takes samples"),
        (Plain, {"samples": 3}, r"settings.samples = 3", "it takes none"),
        (Needy, {"width": 3}, r"settings.rows = \(not set\): Needy.__init__ needs it", "--set"),
    ],
)
def test_refused(kind: type, settings: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        check_settings(kind, asked(**settings))
    assert hint in caught.value.hint


def test_taken() -> None:
    check_settings(Strict, asked())
    check_settings(Strict, asked(samples=3))
    check_settings(Needy, asked(rows=1, anything=2))
