"""A member's words are kept until they are in the log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import VirtualClock
from raycloud.events import MemberLeaving, Noticed
from raycloud.redact import redact_text
from raycloud.report.recorder import Journals
from raycloud.worker import outbox
from raycloud.worker.outbox import LogCapture, LogLines, Outbox, OutboxEntry


def said(*names: str) -> list[Noticed]:
    return [Noticed(what=name) for name in names]


def whats(words: list[OutboxEntry]) -> list[tuple[int, str]]:
    return [(word.number, word.event.what) for word in words]


def test_words_are_told_once_and_in_their_order():
    words = Outbox(3)
    words.add(said("a", "b"))
    assert words.unsent
    told = words.take(0)
    assert whats(told) == [(1, "a"), (2, "b")]
    assert {word.member for word in told} == {3}
    assert not words.unsent
    words.add(said("c"))
    assert whats(words.take(2)) == [(3, "c")]


def test_another_driver_is_told_what_is_not_written():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.take(0)
    words.add(said("d"))
    words.resend(1)
    assert words.unsent
    assert whats(words.take(1)) == [(2, "b"), (3, "c"), (4, "d")]
    words.resend(1)  # that one is killed, too, and had written nothing
    assert whats(words.take(1)) == [(2, "b"), (3, "c"), (4, "d")]


def test_what_is_written_is_forgotten():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.take(0)
    assert words.take(3) == []
    words.resend(0)
    assert words.take(0) == []


def test_the_same_process_as_another_member_says_only_that_its_machine_goes():
    words = Outbox(1)
    leaving = MemberLeaving(member=1, reason="spot", deadline_s=9.0)
    words.add([*said("a"), leaving, *said("b")])
    words.take(0)
    again = words.rejoin_as(4)
    assert [word.event for word in again.take(0)] == [replace(leaving, member=4)]
    words.take(3)
    assert not words.rejoin_as(5).unsent


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def listening(clock: VirtualClock) -> Iterator[LogCapture]:
    """A journal of the logger `here`, in step 7."""
    logger = logging.getLogger("here")
    one = LogCapture(3, clock, lambda: 7)
    one.listen(logger)
    yield one
    logger.removeHandler(one)
    logger.setLevel(logging.NOTSET)


def records(found: list[LogLines]) -> list[dict[str, Any]]:
    assert all(one.member == 3 for one in found)
    return [json.loads(line) for one in found for line in one.lines]


def test_a_line_says_when_who_what_and_in_which_step(listening: LogCapture) -> None:
    logging.getLogger("here.below").info("seen %d rows", 5)
    logging.getLogger("here").debug("too small")
    logging.getLogger("here").warning("token=hunter2")
    assert records(listening.fetch()) == [
        {"format": 1, "t": 1000.0, "level": "INFO", "logger": "here.below",
         "message": "seen 5 rows", "step": 7},
        {"format": 1, "t": 1000.0, "level": "WARNING", "logger": "here",
         "message": "token=[redacted]", "step": 7},
    ]  # fmt: skip
    assert listening.fetch() == []


def test_a_traceback_is_part_of_the_message(listening: LogCapture) -> None:
    try:
        int("https://me:hunter2@host")
    except ValueError:
        logging.getLogger("here").exception("it failed")
    (record,) = records(listening.fetch())
    assert record["message"].startswith("it failed\nTraceback")
    assert record["message"].endswith(": 'https://[redacted]@host'")


def test_what_cannot_be_written_is_told(listening: LogCapture) -> None:
    bad = {"name": "here", "levelname": "INFO", "msg": "%d rows", "args": ("no number",)}
    listening.emit(logging.makeLogRecord(bad))  # pytest's own would raise if it were logged
    (record,) = records(listening.fetch())
    assert record["message"] == "'%d rows' cannot be written: TypeError"


def test_too_much_is_left_out_and_counted(listening: LogCapture, clock: VirtualClock) -> None:
    for n in range(int(outbox.BURST) + 50):
        logging.getLogger("here").info("%d", n)
    found = records(listening.fetch())
    assert [record["message"] for record in found[:-1]] == [
        str(n) for n in range(int(outbox.BURST))
    ]
    assert found[-1]["message"] == "50 lines were left out: too many at once"
    clock.advance(0.1)
    for _ in range(50):
        logging.getLogger("here").info("again")
    assert len(records(listening.fetch())) == int(0.1 * outbox.RATE_PER_S) + 1


def test_a_long_message_is_cut(listening: LogCapture) -> None:
    logging.getLogger("here").info("x" * (outbox.MOST_LETTERS + 5))
    (record,) = records(listening.fetch())
    assert record["message"].endswith("x... (5 letters cut off)")


def test_what_is_far_too_long_is_cut_before_it_is_looked_into(
    listening: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that cut goes through a secret, the half that is left has no shape: it stays out."""
    looked_into: list[int] = []

    def counted(text: str) -> str:
        looked_into.append(len(text))
        return redact_text(text)

    monkeypatch.setattr(outbox, "redact_text", counted)
    most = 4 * outbox.MOST_LETTERS
    for head in ("", "token="):
        message = f"{head}{'x' * (most - len(head) - 10)} hf_{'aB3d' * 10} {'y' * 10**6}"
        logging.getLogger("here").info(message)
    whole, hidden = (record["message"] for record in records(listening.fetch()))
    assert max(looked_into) == most
    beyond = len(message) - outbox.MOST_LETTERS
    assert whole == "x" * outbox.MOST_LETTERS + f"... ({beyond} letters cut off)"
    assert "hf_" not in hidden
    assert hidden.endswith(" letters cut off)")


def test_files_go_on_and_are_put_aside_when_they_have_grown(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    line = json.dumps({"format": 1, "message": "https://me:hunter2@host"})
    Journals(folder).write(4, [line])
    path = folder / "member-4.jsonl"
    with path.open("a") as file:
        file.write('{"torn')
    again = Journals(folder, most_bytes=120)
    again.write(4, [line])
    lines = path.read_text().splitlines()
    assert [json.loads(one)["message"] for one in lines] == ["https://[redacted]@host"] * 2
    again.write(4, [line])
    assert not path.exists()
    aside = folder / "member-4.1.jsonl"
    assert len(aside.read_text().splitlines()) == 3
    again.write(4, [line])
    assert len(path.read_text().splitlines()) == 1


def test_what_is_printed_is_taken_in_line_by_line_and_handed_on(listening: LogCapture) -> None:
    behind = io.StringIO()
    stream = listening.capture(behind)
    print("rows:", 3, file=stream)
    print("half", end="", file=stream)
    print(" a line, token=hunter2", file=stream)
    stream.write("\r 10%\r 20%\n\n")
    stream.flush()
    found = records(listening.fetch())
    assert [r["message"] for r in found] == ["rows: 3", "half a line, token=[redacted]", " 20%"]
    assert {(r["logger"], r["level"], r["step"]) for r in found} == {("print", "INFO", 7)}
    assert "half a line, token=hunter2" in behind.getvalue()
    assert not stream.isatty()
