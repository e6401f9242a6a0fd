"""The cases of tests/cases as users run them, with two workers; tests/cases has one, too."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycloud
from raycloud.errors import RaycloudError, public_name
from raycloud.events import Noticed, StepsCommitted
from raycloud.report.audit import audit
from tests.cases import threads
from tests.cases.expected import CASES, NAMES, exit_code, expected
from tests.live import events, of_kind, parameters

CPUS = 2
WORKERS = 2

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.full]


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, run_dir = expected(name), tmp_path / "run"
    monkeypatch.chdir(CASES / name)
    error, said = "", ""
    try:
        raycloud.train(threads.asked(name, WORKERS).resolved(), run_dir=run_dir)
    except RaycloudError as found:
        error, said = public_name(found), str(found)
    told = events(run_dir) if run_dir.is_dir() else []
    said += "".join(f"\n{one.what} {dict(one.detail)}" for one in of_kind(Noticed, told))
    assert exit_code(error) == right.exit, said
    for words in right.says:
        assert words in said
    if right.steps is not None and run_dir.is_dir():
        assert (
            max((one.last_step for one in of_kind(StepsCommitted, told)), default=0) == right.steps
        )
    if right.exit == 0:
        assert audit(run_dir).ledger.exact
    if right.plain is not None:
        (tmp_path / "plain").mkdir()
        plain = threads.plain_loop(name, tmp_path / "plain")
        assert threads.apart(parameters(run_dir), plain) <= right.plain
