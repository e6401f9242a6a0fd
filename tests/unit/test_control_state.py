"""The states of control: each is changed in its own file, and an illegal event tells its story."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from raycloud import events as e
from raycloud.control import machine
from raycloud.control.checkpoints import Checkpoints
from raycloud.control.data import Data, Progress
from raycloud.control.exchange import _Waited
from raycloud.control.member import Member, Roster
from raycloud.control.membership import Membership, Outstanding
from raycloud.control.recovery import Incident, Recovery
from raycloud.control.tables import PHASE_ON_EVENT
from raycloud.errors import InternalError
from tests.control_job import control, report, training

ROOM = Path(machine.__file__).parent
OWNED = {
    "checkpoints": (Checkpoints,),
    "data": (Data,),
    "membership": (Membership, Outstanding, Member, Roster),
    "recovery": (Recovery, Incident),
    "exchange": (_Waited,),
}
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "sort", "update"),
}


def owners() -> dict[str, set[str]]:
    """The files that may change a field, by its name."""
    found: dict[str, set[str]] = {}
    for stem, kinds in OWNED.items():
        for kind in kinds:
            for one in fields(kind):
                found.setdefault(one.name, set()).add(stem)
                if kind is Member or kind is Roster:
                    found[one.name].add("member")
    for name in vars(Progress(**_progress())):
        found.setdefault(name, set()).add("data")
    return found


def _progress():
    known = training()._state.data.formed()
    where = {"position": known.position_at(0), "step": 0, "generation": 0}
    return {"steps": known.steps, "ledger": known.ledger, **where}


def places(target: ast.expr) -> Iterator[ast.Attribute]:
    """The fields that are assigned to, or into."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from places(part)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            yield from places(value)
        case ast.Attribute(value=ast.Name(id="self")):
            pass
        case ast.Attribute():
            yield target


def changed(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Each field of something other than `self` that is changed."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    yield from places(target)
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield from places(target)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in CHANGING:
                yield from places(value)


def wrongs(name: str, tree: ast.AST) -> list[str]:
    known = owners()
    spots = [spot for spot in changed(tree) if name not in known.get(spot.attr, {name})]
    return [f"{name}:{spot.lineno}: {spot.attr}" for spot in spots]


def test_a_state_is_changed_in_its_own_file_alone():
    found = [w for p in sorted(ROOM.glob("*.py")) for w in wrongs(p.stem, ast.parse(p.read_text()))]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "state.membership.group = ()",
        "membership.met, x = True, 1",
        "member.heard_s = 1.0",
        "state.recovery.losing += 1",
        "state.recovery.left_out.add(3)",
        "incident.lost.append(3)",
        "state.data.skips.clear()",
        "del membership.absent_since_s[3]",
        "membership.groups[3] = ()",
        "progress.furthest = 3",
        "state.checkpoints.save_asked = True",
    ],
)
def test_what_another_file_changes_is_seen(line):
    assert wrongs("machine", ast.parse(line))


def test_an_illegal_event_tells_of_the_events_before_it():
    job = training()
    for step in range(1, 20):
        for member in (0, 1):
            job.on(report(job, member, step - 1, step), float(step))
    with pytest.raises(InternalError, match=r"the last events before it:") as raised:
        job.on(e.ChangeApplied(member=1, change=7, step=3), 20.0)
    told = str(raised.value)
    assert told.startswith("ChangeApplied is illegal: change 7 is not outstanding")
    lines = told.splitlines()[3:]
    assert [line.split("(")[0].strip() for line in lines] == [
        f"{at}.00 s StepsCommitted" for at in (16, 16, 17, 17, 18, 18, 19, 19)
    ]
    assert "member=1" in lines[-1]
    assert str(pickle.loads(pickle.dumps(raised.value))) == told
    assert job.committed_step == 19


def test_the_first_event_may_be_illegal():
    with pytest.raises(InternalError, match=r"there is no member 9") as raised:
        control().on(e.MemberLost(member=9, reason="r"), 0.0)
    assert str(raised.value).endswith("the last events before it: none")


def test_all_events_that_a_phase_knows_are_taken_in() -> None:
    known = {kind for row in PHASE_ON_EVENT.values() for kind in row}
    assert known <= machine._ABSORB.keys()
