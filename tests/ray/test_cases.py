"""The cases of tests/cases as users run them, with one worker and with two."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

import raycloud
from raycloud.errors import RaycloudError, public_name
from raycloud.events import Noticed, StepsCommitted
from raycloud.report.audit import audit
from tests.cases import threads
from tests.cases.expected import CASES, NAMES, exit_code, expected
from tests.live import events, of_kind, parameters

CPUS = 2
WORKERS = (1, 2)

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.full]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    """The run of a case with so many workers: where it is kept, its error, and what it said."""

    @cache
    def run(name: str, workers: int) -> tuple[Path, str, str]:
        folder, error, said = tmp_path_factory.mktemp(name) / "run", "", ""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(CASES / name)
            try:
                asked = threads.asked(name, workers).resolved()  # workers are elsewhere
                raycloud.train(asked, run_dir=folder)
            except RaycloudError as found:
                error, said = public_name(found), str(found)
        noticed = of_kind(Noticed, events(folder)) if folder.is_dir() else []
        return folder, error, "\n".join([said, *(f"{n.what} {dict(n.detail)}" for n in noticed)])

    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """A plain loop's result by case, computed once."""

    @cache
    def found(name: str) -> dict[str, Tensor]:
        return threads.plain_loop(name, tmp_path_factory.mktemp("plain"))

    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_right(name: str, workers: int, ran, plain) -> None:
    right = expected(name)
    run_dir, error, said = ran(name, workers)
    assert exit_code(error) == right.exit, said
    for words in right.says:
        assert words in said
    if right.steps is not None and run_dir.is_dir():
        done = [event.last_step for event in of_kind(StepsCommitted, events(run_dir))]
        assert max(done, default=0) == right.steps
    if right.exit == 0:
        assert audit(run_dir).ledger.exact
    near = right.alone if workers == 1 and right.alone is not None else right.plain
    if near is not None:
        assert threads.apart(parameters(run_dir), plain(name)) <= near


@pytest.mark.parametrize("name", [n for n in NAMES if expected(n).workers is not None])
def test_two_workers_have_the_result_of_one(name: str, ran) -> None:
    one, two = (parameters(ran(name, workers)[0]) for workers in WORKERS)
    near = expected(name).workers
    assert near is not None
    assert threads.apart(two, one) <= near
