"""Cards: what they say of a run, as lines of a log, and back as a display; what a run costs."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.clock import VirtualClock
from raycloud.events import (
    CheckpointPublished,
    Event,
    GenerationFormed,
    MemberLost,
    MemberReady,
    MemberSpawned,
    RunFinished,
    RunStarted,
    StepsCommitted,
    StopRequested,
)
from raycloud.report.progress import show_log, shown_as_cards, status_text
from raycloud.report.run_status import PREFIX, RunStatus, parse_line, status_of, to_line
from raycloud.report.summary import cost, nodes
from raycloud.report.summary_text import summary_text
from raycloud.spec import Job
from tests import logs
from tests.lockstep import job
from tests.logs import fold, tally_of

DIRECTORY = Path("/runs/one")
STARTED = RunStarted(job="gpt", version="1")


def ready(member: int, node: str = "", price: float | None = None) -> MemberReady:
    return replace(logs.ready(member, node=node), price_per_hour=price)


def committed(member: int, first: int, last: int, loss: float = 2.0) -> StepsCommitted:
    return replace(logs.commit(member, first, last, loss=loss), wall_s=1.0, bytes_sent=100)


FORMED = GenerationFormed(generation=0, members=(0, 1), shares=(3, 1), first_step=0)
SAVED = CheckpointPublished(step=2, path="/c/step-2", state_bytes=40, write_s=0.1)
EVENTS: tuple[tuple[float, Event], ...] = (
    (100.0, STARTED),
    (101.0, MemberSpawned(member=0)),
    (101.0, MemberSpawned(member=1)),
    (102.0, ready(0, "a", 2.0)),
    (104.0, ready(1, "a", 2.0)),
    (105.0, FORMED),
    (106.0, committed(0, 0, 2)),
    (106.0, committed(1, 0, 2)),
    (107.0, SAVED),
    (110.0, committed(0, 2, 6, 1.5)),
    (110.0, committed(1, 2, 6, 1.5)),
)


def whole() -> RunStatus:
    return status_of(tally_of(*EVENTS), now_t=112.0, unix_s=1012.0, steps=30, directory=DIRECTORY)


def test_card_says_how_the_run_stands() -> None:
    card = whole()
    assert (card.run, card.job, card.status, card.directory) == (
        "one", "gpt", "running", "/runs/one",
    )  # fmt: skip
    assert (card.step, card.steps, card.samples, card.loss) == (6, 30, 48, 1.5)
    assert (card.workers, card.members, card.shares, card.generation) == (2, (0, 1), (3, 1), 0)
    assert card.samples_per_s == pytest.approx(8.0)
    assert card.left_s == pytest.approx(24.0)  # 24 steps, one a second
    assert (card.t, card.checkpoint_step, card.checkpoint_t) == (1012.0, 2, 1007.0)
    assert (card.recoveries, card.bytes_sent) == (0, 400)
    assert card.cost == pytest.approx(2.0 * 10 / 3600)  # one node, from its first member on


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ((), "running"),
        ((StopRequested(reason="Ctrl-C"),), "stopping"),
        ((StopRequested(reason="Ctrl-C"), RunFinished(status="stopped", steps=6)), "stopped"),
        ((RunFinished(status="failed", steps=6, error="no"),), "failed"),
    ],
)
def test_status(more: tuple[Event, ...], status: str) -> None:
    tally = tally_of(*EVENTS, *((111.0, event) for event in more))
    card = status_of(tally, now_t=112.0)
    assert card.status == status
    assert card.has_ended == (status in {"stopped", "failed"})
    assert card.after_end().status == (status if card.has_ended else "killed")


def test_a_run_that_starts_has_members_but_no_numbers() -> None:
    card = status_of(tally_of(*EVENTS[:4]), now_t=103.0)
    assert (card.status, card.workers, card.ready, card.generation) == ("starting", 2, 1, None)
    assert (card.loss, card.samples_per_s, card.left_s) == (None, None, None)
    assert status_text(card) == "starting: 1 of 2 workers ready"


def test_a_loss_that_is_no_number_is_not_known() -> None:
    tally = tally_of(*EVENTS[:6], (106.0, committed(0, 0, 2, math.nan)))
    assert status_of(tally, now_t=107.0).loss is None


def test_line_and_card_are_each_others_inverse() -> None:
    line = to_line(whole())
    assert line.startswith(PREFIX)
    assert "\n" not in line
    assert parse_line(line) == parse_line(line + "\r\n") == whole()


def test_line_holds_no_secret() -> None:
    card = replace(whole(), error="cannot read s3://me:hunter2@host/data", directory="?token=abcd")
    line = to_line(card)
    assert "hunter2" not in line
    assert "abcd" not in line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 3 of 5",
        PREFIX,
        PREFIX + "[]",
        PREFIX + '{"format":1}',
        PREFIX + "[" * 60_000,
        PREFIX + " " * 70_000 + "{}",
        " " + to_line(whole()),
    ],
)
def test_other_lines_are_no_cards(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("step", "6"),
        ("step", True),
        ("step", None),
        ("loss", [1]),
        ("samples_per_s", math.inf),
        ("members", ["a"]),
        ("members", 3),
        ("run", 5),
        ("error", {}),
    ],
)
def test_a_card_with_a_value_of_another_kind_is_no_card(name: str, value: object) -> None:
    record = {**whole().to_record(), name: value}
    assert parse_line(PREFIX + json.dumps(record)) is None


def test_a_newer_card_of_this_format_is_read() -> None:
    record = {**whole().to_record(), "mood": "good"}
    assert parse_line(PREFIX + json.dumps(record)) == whole()


def test_cards_come_at_most_every_five_seconds_and_a_last_one() -> None:
    clock, lines, notes = VirtualClock(1000.0), list[str](), list[str]()
    with shown_as_cards(_job(), clock, lines.append, note=notes.append, directory=DIRECTORY) as see:
        for _, event in EVENTS[:6]:
            see(event)
        assert len(lines) == 1
        for step in range(20):
            for member in (0, 1):
                see(committed(member, step, step + 1))
            clock.advance(1.0)
        many = len(lines)
        see(RunFinished(status="finished", steps=20))
    cards = [parse_line(line) for line in lines]
    assert all(card is not None and card.run == "one" for card in cards)
    assert 4 <= many <= 6  # 20 s, the first at once, and one for the first step
    assert lines[-1] != lines[many - 1]
    assert [(card.status, card.step) for card in cards if card][-1] == ("finished", 20)
    assert notes == ["generation 0 from step 0: 2 workers, shares 3 1"]


def test_a_log_is_shown_without_its_secrets() -> None:
    said = list[str]()
    lines = [
        "raycloud train a.yaml --set settings.api_key=hunter2 --set settings.n=3\n",
        "reads https://me:hunter2@host/a",
    ]
    show_log(lines, plain=True, say=said.append)
    assert said == [
        "raycloud train a.yaml --set settings.api_key=[redacted] --set settings.n=3",
        "reads https://[redacted]@host/a",
    ]


def test_a_log_becomes_the_plain_progress_lines() -> None:
    said: list[str] = []
    lines = ["note\n", to_line(whole()) + "\n", to_line(whole()), "a\x1b[2Jb\r\n"]
    assert show_log(lines, plain=True, say=said.append) == whole()
    shown = status_text(status_of(tally_of(*EVENTS), now_t=112.0, steps=30))
    assert said == ["note", shown, "a?[2Jb"]  # once: the second says nothing new
    assert said[1].endswith(" · cost 0.005556")
    assert said[1].startswith("step 6/30 · loss 1.5 · 8 samples/s · 24.0 s left · 2 workers")


def test_a_log_becomes_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    said: list[str] = []
    show_log(["[red]note[/red]", to_line(whole())], plain=False, say=said.append)
    assert said == []
    assert "[red]note[/red]" in terminal.getvalue()
    assert "━" in terminal.getvalue()
    assert PREFIX not in terminal.getvalue()


def test_each_node_costs_once_until_its_session_ends() -> None:
    hour = 3600.0
    tally = tally_of(
        (0.0, STARTED),
        (0.0, ready(0, "a", 2.0)),
        (hour, ready(1, "a", 2.0)),
        (hour, ready(2, "b", 10.0)),
        (hour, ready(3, "c")),
        (2 * hour, MemberLost(member=2, reason="gone")),
        (2 * hour, ready(4, "b", 10.0)),
    )
    assert cost(tally) == pytest.approx(2 * 2.0 + 1 * 10.0)
    assert cost(tally, 3 * hour) == pytest.approx(3 * 2.0 + 2 * 10.0)
    assert nodes(tally) == (2, 3)
    tally.apply(4 * hour, RunFinished(status="stopped", steps=0))
    assert cost(tally, 9 * hour) == pytest.approx(4 * 2.0 + 3 * 10.0)
    tally.apply(10 * hour, RunStarted(job="gpt", version="1", resumed_from_step=0))
    tally.apply(10 * hour, ready(5, "a", 3.0))
    assert cost(tally, 11 * hour) == pytest.approx(38.0 + 3.0)


def test_a_run_without_prices_has_no_cost() -> None:
    tally = tally_of((0.0, STARTED), (0.0, ready(0, "a")))
    assert cost(tally, 3600.0) is None
    assert "cost" not in summary_text(fold([(0.0, STARTED), (0.0, ready(0, "a"))]))


def test_the_summary_says_what_it_cost() -> None:
    entries = [
        (0.0, STARTED),
        (0.0, ready(0, "a", 2.5)),
        (0.0, ready(1, "b")),
        (3600.0, RunFinished(status="finished", steps=0)),
    ]
    summary = fold(entries)
    assert (summary.cost, summary.nodes, summary.priced_nodes) == (2.5, 2, 1)
    assert "cost         2.5 for 1 of 2 nodes, the others have no price" in summary_text(summary)


def _job() -> Job:
    return job(steps=20)
