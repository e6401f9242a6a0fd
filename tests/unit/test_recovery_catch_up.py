"""Newcomers follow the others until they have the state: real members, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.commands import Form, Halt, Meet, Reshare
from raycloud.errors import TransportError
from raycloud.events import (
    ChangeApplied,
    EvaluationPart,
    ExchangeBroken,
    MemberCaughtUp,
    MemberDone,
    Noticed,
    PartWritten,
    StepsCommitted,
)
from raycloud.net.stream import Stream
from raycloud.order import StepSpan, deal
from raycloud.recovery import catch_up
from raycloud.spec import Job
from tests.fellows import Fellows
from tests.live_tasks import Paced, Steady
from tests.lockstep import difference, job, plain_loop
from tests.poisoned import PacedPoison, hit
from tests.tiers import variants

STEPS = 120
KEPT = 6
EPOCH = 5


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No byte of any state travels before this is set."""
    opened, send = threading.Event(), Stream.send

    def held_up(stream: Stream, chunk: memoryview) -> None:
        assert opened.wait(60.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", held_up)
    yield opened
    opened.set()


def asked(folder: Path, **changes: Any) -> Job:
    settings = {"gate": str(folder / "gate"), "pause_s": 0.002, "dropout": 0.0, "norm": True}
    values = {"task": Paced, "steps": STEPS, "settings": settings}
    return job(**{**values, "checkpoint": {"every_steps": 10}, **changes})


def begin(fellows: Fellows, following: tuple[int, ...] = (2,)) -> Meet:
    """Members 0 and 1 compute, and the newcomers follow them as generation 1."""
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    members, shares = (0, 1, *following), (5, 3, *(0 for _ in following))
    meet = Meet(generation=1, members=members, shares=shares, following=following)
    fellows.prepare(1, meet, (0, 1))
    return meet


def lose_1(fellows: Fellows) -> None:
    """Member 1 is gone, as far as the others know: they meet, and 2 and 3 still follow."""
    fellows.members[1].abandon(1)
    members, shares = (0, 2, 3), (8, 0, 0)
    fellows.form(
        Form(generation=2, members=members, shares=shares, step=0, settled=1, following=(2, 3))
    )


def check_end(fellows: Fellows, asked: Job, members: tuple[int, ...], steps: int = STEPS) -> None:
    """All are alike, bit by bit, and what a single process computes."""
    (Path(asked.settings["gate"])).touch()
    fellows.until(MemberDone, members)
    first, *others = [fellows.replica(member) for member in members]
    for other in others:
        mine, theirs = first.state.tensors(), other.state.tensors()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert other.learning_rate == first.learning_rate
    samples = asked.settings.get("samples", 70)
    reference = plain_loop(asked, Steady(dropout=0.0, norm=True, samples=samples), steps)
    assert difference(first.model, reference) <= 1e-9


@pytest.mark.timeout(120)
def test_a_newcomer_catches_up_bit_by_bit(tmp_path: Path, gate: threading.Event) -> None:
    job = asked(tmp_path, evaluate={"every_steps": 10})
    fellows = Fellows(tmp_path / "kept", job, 2)
    begin(fellows)
    fellows.until(ChangeApplied, (0, 1))
    [met] = {event.step for event in fellows.of(ChangeApplied)}
    fellows.come_to(0, met + KEPT)
    gate.set()
    fellows.until(MemberCaughtUp, (2,))
    [caught_up] = fellows.of(MemberCaughtUp)
    assert (caught_up.member, caught_up.generation, caught_up.first_step) == (2, 1, met)
    assert caught_up.step >= met + KEPT
    fellows.prepare(2, Reshare(generation=2, shares=(3, 3, 2), caught_up=(2,)), (0, 1, 2))
    fellows.until(ChangeApplied, (0, 1), more=2)
    in_force = fellows.of(ChangeApplied, 0)[1].step
    check_end(fellows, job, (0, 1, 2))
    told = fellows.of(StepsCommitted, 2)
    assert told[0].first_step == caught_up.step
    parts = [deal((3, 3, 2), 3 if step % 5 == 4 else 8)[2] for step in range(in_force, STEPS)]
    assert sum(one.micro_batches for one in told) == sum(parts)  # an epoch's last step is short
    for kind in (PartWritten, EvaluationPart):  # of who has the state since all have a share
        assert {e.step for e in fellows.of(kind, 2)} == {
            e.step for e in fellows.of(kind, 0) if e.step > in_force or e.generation == 2
        }
    assert {p.part["rank"] for p in fellows.of(PartWritten) if p.generation == 1} <= {0, 1}


@pytest.mark.full(only="over real sockets: several follow")
@pytest.mark.timeout(120)
def test_several_follow_while_another_is_lost(tmp_path: Path, gate: threading.Event) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=2)
    begin(fellows, following=(2, 3))
    fellows.until(ChangeApplied, (0, 1))
    fellows.come_to(2, fellows.of(ChangeApplied)[0].step + 3)
    lose_1(fellows)
    fellows.until(StepsCommitted, (0,), more=3)
    fellows.come_to(0, fellows.of(StepsCommitted, 0)[-1].last_step + KEPT)
    gate.set()
    fellows.until(MemberCaughtUp, (2, 3))
    assert {event.generation for event in fellows.of(MemberCaughtUp)} == {2}
    fellows.prepare(2, Reshare(generation=3, shares=(2, 3, 3), caught_up=(2, 3)), (0, 2, 3))
    check_end(fellows, job, (0, 2, 3))
    assert sum(one.micro_batches for one in fellows.of(StepsCommitted, 3)) > 0


@pytest.mark.full(only="over real sockets: the others wait")
@pytest.mark.timeout(120)
def test_where_nothing_more_can_be_kept_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "room_bytes", lambda _: 0)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2)
    begin(fellows)
    fellows.until(MemberCaughtUp, (2,))
    [caught_up] = fellows.of(MemberCaughtUp)
    assert caught_up.step == caught_up.first_step + 1
    check_end(fellows, job, (0, 1, 2))


@pytest.mark.timeout(120)
def test_a_run_may_end_before_a_newcomer_has_caught_up(
    tmp_path: Path, gate: threading.Event
) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2)
    begin(fellows)
    fellows.until(ChangeApplied, (0, 1))
    fellows.prepare(2, Halt(reason="asked"), (0, 1, 2))
    fellows.until(ChangeApplied, (0, 1, 2))
    halted = fellows.of(ChangeApplied, 2)[0].step
    check_end(fellows, job, (0, 1), steps=halted)
    fellows.until(MemberDone, (2,))
    assert not fellows.of(MemberCaughtUp)
    assert not fellows.of(StepsCommitted, 2)
    parts = {p.member: p.part["rank"] for p in fellows.of(PartWritten) if p.step == halted}
    assert parts == {0: 0, 1: 1}


@pytest.mark.full
@pytest.mark.timeout(120)
def test_who_cannot_follow_takes_the_state_in_a_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Stream.send

    def broken(stream: Stream, chunk: memoryview) -> None:
        if threading.current_thread().name.startswith("stream-"):
            raise TransportError("the network is out of order")
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", broken)
    for attempt in range(5):  # where the break leaves the others a step apart, all meet at once
        folder = tmp_path / str(attempt)
        folder.mkdir()
        job = asked(folder)
        fellows = Fellows(folder / "kept", job, 2)
        begin(fellows)
        for generation in (2, 3, 4):
            more = generation - 1
            fellows.until(ExchangeBroken, (2,), more=more, unless=MemberCaughtUp)
            if fellows.of(MemberCaughtUp):
                break
            fellows.form(
                Form(
                    generation=generation,
                    members=(0, 1, 2),
                    shares=(5, 3, 0),
                    step=0,
                    settled=1,
                    following=(2,),
                )
            )
        fellows.until(MemberCaughtUp, (2,))
        [caught_up] = fellows.of(MemberCaughtUp)
        check_end(fellows, job, (0, 1, 2))
        if caught_up.generation == 4:
            break
        fellows.close()
    assert (caught_up.generation, caught_up.first_step) == (4, caught_up.step)
    [told] = [one for one in fellows.of(Noticed) if "a meeting" in one.what]
    assert (told.member, told.detail) == (2, {"tries": 3})


@pytest.mark.full
@pytest.mark.timeout(120)
def test_who_has_caught_up_says_so_anew_where_another_still_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first word came when the driver had called them to meet as followers again."""
    opened, send = threading.Event(), Stream.send

    def first_goes(stream: Stream, chunk: memoryview) -> None:
        assert threading.current_thread().name == "stream-0" or opened.wait(60.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", first_goes)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=2)
    begin(fellows, following=(2, 3))
    fellows.until(MemberCaughtUp, (2,))
    assert not fellows.of(MemberCaughtUp, 3)
    lose_1(fellows)
    fellows.until(MemberCaughtUp, (2,), more=2)
    again = fellows.of(MemberCaughtUp, 2)[1]
    assert (again.generation, again.step) == (2, again.first_step)
    opened.set()
    fellows.until(MemberCaughtUp, (3,))
    fellows.prepare(2, Reshare(generation=3, shares=(2, 3, 3), caught_up=(2, 3)), (0, 2, 3))
    check_end(fellows, job, (0, 2, 3))


@pytest.mark.full
@pytest.mark.timeout(120)
def test_who_follows_begins_anew_where_one_leaves(tmp_path: Path, gate: threading.Event) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2)
    begin(fellows)
    fellows.until(ChangeApplied, (0, 1))
    meet = Meet(generation=2, members=(0, 2), shares=(8, 0), following=(2,))
    fellows.prepare(2, meet, (0, 1, 2))
    fellows.until(ChangeApplied, (0, 1), more=2)
    gate.set()
    fellows.until(MemberCaughtUp, (2,))
    assert fellows.of(MemberCaughtUp)[0].generation == 2
    fellows.prepare(3, Meet(generation=3, members=(2,), shares=(8,)), (0, 2))
    fellows.until(ChangeApplied, (0,), more=3)
    check_end(fellows, job, (2,))


@pytest.mark.full(only="over real sockets: skipped meanwhile")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", variants("nan", "loss", "backward", "hidden"))
def test_what_is_skipped_meanwhile_is_skipped_by_who_follows(
    tmp_path: Path, gate: threading.Event, how: str
) -> None:
    """One micro-batch in each epoch of five steps, or one of its steps; some of them are kept."""
    errors = {"on_error": "skip", "on_nan": "skip", "most_skipped": STEPS}
    bad = {"bad": [31], "norm": True}
    settings = {"gate": str(tmp_path / "gate"), "pause_s": 0.002, "how": how, **bad}
    job = asked(tmp_path, task=PacedPoison, settings=settings, errors=errors)
    fellows = Fellows(tmp_path / "kept", job, 2, task=PacedPoison)
    begin(fellows)
    fellows.until(ChangeApplied, (0, 1))
    met = fellows.of(ChangeApplied)[0].step
    fellows.come_to(0, met + 2 * EPOCH)
    gate.set()
    fellows.until(MemberCaughtUp, (2,))
    [caught_up] = fellows.of(MemberCaughtUp)
    fellows.prepare(2, Reshare(generation=2, shares=(3, 3, 2), caught_up=(2,)), (0, 1, 2))
    (tmp_path / "gate").touch()
    fellows.until(MemberDone, (0, 1, 2))
    first, *others = (fellows.replica(member) for member in (0, 1, 2))
    for other in others:
        mine, theirs = first.state.tensors(), other.state.tensors()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert other.state.values() == first.state.values()
    skipped = [skip.step for skip in first.history.skips]
    assert len(skipped) == STEPS // EPOCH
    assert any(met <= step < met + 2 * EPOCH for step in skipped)
    told = {member: fellows.of(StepsCommitted, member) for member in (0, 2)}
    by = {member: [s["step"] for e in said for s in e.skips] for member, said in told.items()}
    assert by == {0: skipped, 2: [step for step in skipped if step >= caught_up.step]}
    clean = PacedPoison(how="memory", most=99, **bad)

    def drops(span: StepSpan) -> bool:
        return how in {"hidden", "nan"} and any(hit(job, clean, m) for m in span.micro_batches)

    reference = plain_loop(
        job, clean, STEPS, without=lambda m: hit(job, clean, m), passed_over=drops
    )
    trained = reference.named_parameters()
    mine = dict(first.model.named_parameters())
    assert max(float((mine[n] - p).detach().abs().max()) for n, p in trained) <= 1e-9
