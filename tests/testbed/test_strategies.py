"""Commands of the page of strategies, in their quick form: each runs, and says something.

Of races of the same contestants the last one is run, and none of those that
tests/testbed/test_quick.py runs, which looks at the row. All without the limit, which is run there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT
from benchmarks.racing.registry import CONTESTANTS
from benchmarks.racing.results import load
from benchmarks.racing.scenarios import SCENARIOS
from benchmarks.testbed import missing
from tests.testbed.commands import LIMIT_S, said

sys.path.append(str(ROOT / "docs"))
import strategies

REAL = ROOT.parent / "shared" / "data"
COMMANDS = sorted({one.command for one in (*strategies.PAPERS, *strategies.PRACTICAL)} - {""})
RACE = re.compile(r"python -m benchmarks\.run --scenario (\w+) --contestants (\S+)")
RACES = [found for one in COMMANDS if (found := RACE.fullmatch(one))]
QUICKLY = "limit,raycloud"
ASKED = "--contestants"
LAST = {race[2]: race[0] for race in RACES if race[2] != QUICKLY}  # of the same contestants
RUN = [one for one in COMMANDS if not RACE.fullmatch(one) or one in LAST.values()]
# By how a command begins: what makes it quick, and keeps it in a folder.
QUICK = {
    "python -m benchmarks.run": "--quick --json FOLDER/rows.json",
    "python -m benchmarks.backups": "--seconds 5 --repeats 1",
    "python -m benchmarks.codecs": "--turns 1",
    "python -m benchmarks.forecast": "",
    "python -m benchmarks.ingest": "--quick --only order --json FOLDER/rows.json",
    "python -m benchmarks.relaying": "--bytes 2000000 --times 1",
    "python -m benchmarks.storage": "--mbit 50 --seconds 1",
    "raycloud plan": "",
    "raycloud simulate": "--set steps=50",
    "raycloud sweep": "--dir FOLDER/swept --set steps=16 --set sweep.trials=2",
    "raycloud train": "--plain --run-dir FOLDER/run --set epochs=null --set steps=8",
}

pytestmark = [
    pytest.mark.full(only="the commands of the page of strategies"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(LIMIT_S + 30),
]


def test_races_that_are_not_run_are_of_scenarios_and_contestants_that_there_are() -> None:
    for race in RACES:
        assert race[1] in SCENARIOS
        assert {*race[2].split(",")} <= CONTESTANTS.keys()
    assert [one for one in COMMANDS if "benchmarks.run" in one] == [race[0] for race in RACES]


@pytest.mark.parametrize("command", RUN)
def test_it_runs(command: str, tmp_path: Path) -> None:
    if "--data" in command and not REAL.is_dir():
        pytest.skip("the data that it reads is not here")
    [begin] = [one for one in QUICK if command.startswith(one)]
    (tmp_path / "nodes.csv").write_text("name,count,mbit_s\nn,2,1000\n")
    told = f"{command} {QUICK[begin]}".replace("FOLDER", str(tmp_path))
    told = told.replace("DIRECTORY", str(REAL)).replace("nodes.csv", str(tmp_path / "nodes.csv"))
    told = told.replace(f"{ASKED} limit,", f"{ASKED} ")
    program, *words = told.split()
    here = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    assert said([here, *words]).strip()
    if begin.endswith("benchmarks.run"):
        rows = {row["contestant"]: row for row in load(tmp_path / "rows.json")}
        for name in told.split(f"{ASKED} ")[1].split()[0].split(","):
            assert rows[name]["failed"] is None, rows[name]
