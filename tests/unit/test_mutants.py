"""The bugs that `make mutants` plants can still be planted, and differ."""

from __future__ import annotations

import pytest

from tests.mutants import KNOW, MAY_LIVE, MUTANTS, ROOT, Mutant, Outcome, _verdict, known, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_it_can_be_planted(mutant: Mutant) -> None:
    text = (ROOT / "raycloud" / mutant.file).read_text()
    assert planted(mutant) not in ("", text)
    assert known(mutant)


def test_they_differ() -> None:
    assert len({mutant.breaks for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert len({(m.file, m.new) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("old", ["nobody wrote this", "def "])
def test_where_the_code_has_changed_it_is_an_error(old: str) -> None:
    mutant = Mutant(file="order/steps.py", old=old, new="x", breaks="nothing")
    with pytest.raises(ValueError, match=r"has the old text \d+ times, not once"):
        planted(mutant)


def test_every_pattern_finds_tests() -> None:
    patterns = {pattern for room in KNOW.values() for pattern in room}
    patterns |= {pattern for mutant in MUTANTS for pattern in mutant.tests}
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []
    assert [room for room in KNOW if not (ROOT / "raycloud" / room).is_dir()] == []


def test_who_names_its_tests_is_run_with_them_alone() -> None:
    mutant = Mutant(file="x/y.py", old="", new="", breaks="", tests=("tests/unit/test_mutants.py",))
    assert known(mutant) == [ROOT / "tests/unit/test_mutants.py"]
    assert set(known(None)) >= {f for one in MUTANTS for f in known(one)}


def test_one_may_live(capsys: pytest.CaptureFixture[str]) -> None:
    for alive in range(MAY_LIVE + 2):
        names = ["" if n < alive else "FAILED a" for n in range(len(MUTANTS))]
        found = [
            Outcome(mutant=m, caught_by=by, seconds=1.0)
            for m, by in zip(MUTANTS, names, strict=True)
        ]
        assert _verdict(found, 60.0) == (alive > MAY_LIVE)
        out = capsys.readouterr().out
        assert f"{len(MUTANTS) - alive} of {len(MUTANTS)} caught, in 60 s" in out
        assert out.count("not caught: ") == alive
