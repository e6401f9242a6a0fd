"""Small inputs that once gave a wrong result, or a word that did not help: what is right now.

Members are threads of this process; `tests/ray/test_cases.py` runs the same as users do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from tests.cases import threads
from tests.cases.expected import NAMES, exit_code, expected

MEMBERS = (1, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """A plain loop's result by case, computed once."""

    @cache
    def found(name: str) -> dict[str, Tensor]:
        return threads.plain_loop(name, tmp_path_factory.mktemp("plain"))

    return found


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_right(name: str, members: int, tmp_path: Path, plain) -> None:
    right, ended = expected(name), threads.run(name, members, tmp_path)
    assert exit_code(ended.error) == right.exit, ended.said
    assert (ended.status == "finished") == (right.exit == 0), ended.said
    for words in right.says:
        assert words in ended.said
    if right.steps is not None:
        assert ended.steps == right.steps
    near = right.alone if members == 1 and right.alone is not None else right.plain
    if near is not None:
        assert threads.apart(ended.tensors, plain(name)) <= near


@pytest.mark.parametrize("name", [n for n in NAMES if expected(n).workers is not None])
def test_two_workers_have_the_result_of_one(name: str, tmp_path: Path) -> None:
    one, two = (threads.run(name, n, tmp_path / str(n)).tensors for n in MEMBERS)
    near = expected(name).workers
    assert near is not None
    assert one
    assert threads.apart(two, one) <= near
