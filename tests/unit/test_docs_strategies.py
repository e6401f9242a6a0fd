"""The page of strategies: what it names is there, and its figures are those of the files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
import strategies  # noqa: E402 - the pages' own folder is no package

ALL = (*strategies.PAPERS, *strategies.PRACTICAL)


def test_it_has_all_that_the_sources_name() -> None:
    assert len(strategies.PRACTICAL) == 17
    for some in (strategies.PAPERS, strategies.PRACTICAL):
        assert len({one.name for one in some}) == len(some)
    for one in ALL:
        assert one.modules or one.lacks, one.name


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_a_row_names_is_there(one: strategies.Strategy) -> None:
    for module in one.modules:
        assert (ROOT / "raycloud" / module).exists(), module
    assert bool(one.command) == bool(one.test), "what a command shows is held by a test"
    if one.test:
        assert (ROOT / "tests" / one.test).is_file(), one.test
    if one.measured is not None:
        assert (ROOT / one.measured.file).is_file()
        assert any(letter.isdigit() for letter in one.measured.text)


def test_the_page_says_what_is_not_there() -> None:
    page = strategies.render()
    assert page.count("Not there yet:") == sum(bool(one.lacks) for one in ALL)
    assert "TensorFlow" in page
