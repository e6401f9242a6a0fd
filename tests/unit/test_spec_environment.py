"""What the environment says, as values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycloud.spec import Environment


def test_from_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in {"NO_COLOR", "TERM"} or name.startswith(("RAY", "XDG")):
            monkeypatch.delenv(name)
    assert Environment.from_process() == Environment()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert Environment.from_process() == Environment(
        ray_address="10.0.0.1:6379", no_color=True, dumb_terminal=True
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"RAY_ADDRESS": "  "},
        {"NO_COLOR": ""},
        {"TERM": "xterm-256color"},
        {"RAYCLOUD_CACHE": " "},
        {"RAYCLOUD_CLOUD": " "},
        {"XDG_CACHE_HOME": "relative"},
    ],
)
def test_what_says_nothing(variables: dict[str, str]) -> None:
    assert Environment.from_mapping(variables) == Environment()


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "~/.cache/raycloud"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/raycloud"),
        ({"XDG_CACHE_HOME": "/caches", "RAYCLOUD_CACHE": "/fast"}, "/fast"),
        ({"RAYCLOUD_CACHE": "~/fast"}, "~/fast"),
    ],
)
def test_cache(variables: dict[str, str], cache: str) -> None:
    assert Environment.from_mapping(variables).cache == Path(cache)


def test_cloud() -> None:
    assert Environment.from_mapping({"RAYCLOUD_CLOUD": " AWS "}).cloud == "aws"
    assert Environment.from_mapping({"RAYCLOUD_CLOUD": "none"}).cloud == "none"
