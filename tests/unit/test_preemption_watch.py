"""The watch: one thread on a node, each word once, and silence is told once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import MachineError
from raycloud.events import Noticed
from raycloud.preemption import PreemptionNotice, Watch, on_sigterm, watch_here
from raycloud.preemption.clouds import Cloud
from raycloud.preemption.watch import turn_of
from tests.live import ROOT, wait_for

GOING = PreemptionNotice(reason="it goes", deadline_s=100.0)
PERHAPS = PreemptionNotice(reason="it may go", certain=False)
FAR = PreemptionNotice(reason="it goes some day", deadline_s=9000.0)


class Said(Cloud):
    """A cloud that says these words, one after the other, and then the last one for ever."""

    name = "said"

    def __init__(self, *words: PreemptionNotice | Exception | None, every_s: float = 5.0) -> None:
        self.words, self.every_s = list(words), every_s
        self.asked = 0

    def notice(self) -> PreemptionNotice | None:
        self.asked += 1
        word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        if isinstance(word, Exception):
            raise word
        return word


class Slow(Said):
    """A cloud that takes its time."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__(None)
        self.clock, self.seconds = clock, seconds

    def notice(self) -> PreemptionNotice | None:
        self.clock.advance(self.seconds)
        return super().notice()


@pytest.fixture
def key(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.node.name} {tmp_path}"


@pytest.fixture
def closing() -> Iterator[list[Watch]]:
    watches: list[Watch] = []
    yield watches
    for watch in watches:
        watch.close()
        if watch._thread is not None:
            watch._thread.join()


def heard(*words: PreemptionNotice | Exception | None) -> list[PreemptionNotice | Noticed]:
    """What is told of words that come every few seconds."""
    clock, said = VirtualClock(), Said(*words)
    watch = Watch(3, "", None, clock)
    for _ in words:
        clock.advance(watch.look(said))
    return watch.fetch()


def test_a_word_is_told_once() -> None:
    assert heard(None, GOING, GOING, GOING) == [GOING]


def test_a_certain_word_follows_an_uncertain_one() -> None:
    assert heard(PERHAPS, PERHAPS, GOING, GOING) == [PERHAPS, GOING]


def test_a_word_that_was_taken_back_is_told_again() -> None:
    assert heard(GOING, None, GOING) == [GOING, GOING]


def test_a_machine_that_leaves_later_computes_until_then() -> None:
    first, *rest = heard(FAR, FAR, PreemptionNotice(reason=FAR.reason, deadline_s=170.0), FAR)
    assert isinstance(first, Noticed)
    assert first.member == 3
    assert first.detail == {"why": FAR.reason, "in_s": 9000}
    assert rest == [PreemptionNotice(reason=FAR.reason, deadline_s=170.0)]


def test_time_that_a_question_takes_is_no_pause() -> None:
    clock = VirtualClock()
    watch = Watch(0, "", None, clock)
    assert [watch.look(Slow(clock, s)) for s in (0.0, 2.0, 7.0)] == [5.0, 3.0, 0.0]


def test_a_silent_server_is_asked_less_and_told_of_once() -> None:
    clock, said = VirtualClock(), Said(MachineError("nobody there"))
    watch = Watch(3, "", None, clock)
    waits, notices = [], []
    for _ in range(12):
        waits.append(watch.look(said))
        clock.advance(waits[-1])
        notices.append(watch.fetch())
    assert waits == [10.0, 20.0, 40.0, *[60.0] * 9]
    assert [len(one) for one in notices] == [0, 0, 0, 0, 0, 1, *[0] * 6]
    (notice,) = notices[5]
    assert isinstance(notice, Noticed)
    assert notice.detail == {"why": "nobody there", "cloud": "said"}
    said.words = [GOING]
    assert watch.look(said) == 5.0
    assert watch.fetch() == [GOING]


def test_one_error_between_answers_is_not_told() -> None:
    words = [MachineError("late"), None] * 40
    assert heard(*words) == []


def test_no_cloud_no_thread(tmp_path: Path, key: str) -> None:
    before = threading.active_count()
    watch = watch_here(0, key, SystemClock(), dmi=tmp_path)
    assert watch.fetch() == []
    assert threading.active_count() == before


def test_a_word_that_is_no_cloud_is_told_and_nobody_asked(tmp_path: Path, key: str) -> None:
    watch = watch_here(5, key, SystemClock(), "amazon", dmi=tmp_path)
    (notice,) = watch.fetch()
    assert isinstance(notice, Noticed)
    assert notice.member == 5
    assert "RAYCLOUD_CLOUD" in notice.detail["why"]
    assert "none" in notice.detail["hint"]
    assert watch._thread is None


def test_one_of_a_node_asks_and_another_when_it_ends(key: str, closing: list[Watch]) -> None:
    clock = VirtualClock()
    clouds = [Said(GOING, every_s=0.01) for _ in range(2)]
    first, second = (Watch(i, key, cloud, clock) for i, cloud in enumerate(clouds))
    closing += [first, second]
    assert wait_for("the word", first.fetch) == [GOING]
    assert second.fetch() == []
    assert (clouds[1].asked, second._thread) == (0, None)
    first.close()
    assert first._thread is not None
    first._thread.join()
    assert second.fetch() == []  # it looks only now and then whether it is its turn
    assert second._thread is None
    clock.advance(5.0)
    assert wait_for("the word", second.fetch) == [GOING]


def test_what_nobody_foresaw_ends_the_watch_and_is_told(key: str, closing: list[Watch]) -> None:
    watch = Watch(0, key, Said(RuntimeError("odd")), SystemClock())
    closing.append(watch)
    (notice,) = wait_for("the notice", watch.fetch)
    assert isinstance(notice, Noticed)
    assert "odd" in notice.detail["why"]
    assert wait_for("its end", lambda: watch._thread is not None and not watch._thread.is_alive())


def test_a_closed_watch_asks_no_more(key: str) -> None:
    said = Said(None)
    watch = Watch(0, key, said, SystemClock())
    watch.close()
    assert watch.fetch() == []
    assert said.asked == 0
    again = Watch(0, key, said, SystemClock())
    again.fetch()
    wait_for("a question", lambda: said.asked)
    again.close()  # in the midst of its pause of 5 s
    assert again._thread is not None
    again._thread.join(2.0)
    assert not again._thread.is_alive()


def test_others_may_add_what_they_know(key: str) -> None:
    watch = Watch(0, key, None, SystemClock())
    watch.add(GOING)
    assert watch.fetch() == [GOING]


def test_a_turn_ends_with_its_holder(key: str) -> None:
    turn = turn_of(key)
    assert turn is not None
    assert turn_of(key) is None
    other = turn_of(f"{key} of another run")
    assert other is not None
    other.close()
    turn.close()
    again = turn_of(key)
    assert again is not None
    again.close()


PROGRAM = """
import os, signal, sys, threading
from raycloud.preemption import on_sigterm

{before}

def tell(leaving):
    print("told", leaving.deadline_s, leaving.node, flush=True)

on_sigterm(tell, {deadline_s})
{after}
print("ready", flush=True)
while True:  # in short waits: a signal just before a long one would be seen after it
    threading.Event().wait(0.02)
"""

RAYS = """
def rays(number, frame):
    print("before", number, flush=True)
    raise SystemExit(7)
signal.signal(signal.SIGTERM, rays)
"""

FORKED = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")
    for _ in range(3000):  # in short waits, as below
        threading.Event().wait(0.02)
    os._exit(9)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def running(
    before: str = "", after: str = "", deadline_s: float = 60.0
) -> Iterator[subprocess.Popen[str]]:
    program = PROGRAM.format(before=before, after=after, deadline_s=deadline_s)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_the_first_is_a_notice_and_the_second_ends_the_process() -> None:
    with running(RAYS) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "told 60.0 False"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert line(process) == f"before {signal.SIGTERM:d}"
        assert process.wait(30) == 7


@pytest.mark.parametrize(("before", "code"), [("", -signal.SIGTERM), (RAYS, 7)])
def test_the_deadline_ends_it_as_before(before: str, code: int) -> None:
    with running(before, deadline_s=0.2) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "told 0.2 False"
        assert process.wait(30) == code


def test_a_process_that_ignored_it_goes_on() -> None:
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with running(ignored) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("told")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_a_child_that_was_forked_ends_with_the_first() -> None:
    with running(after=FORKED) as process:
        assert line(process) == f"child {-signal.SIGTERM:d}"
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process).startswith("told")  # the parent is told of its own


def test_only_the_main_thread_may_ask() -> None:
    refused: list[ValueError] = []

    def ask() -> None:
        with pytest.raises(ValueError, match="main thread") as caught:
            on_sigterm(lambda _: None)
        refused.append(caught.value)

    before = threading.active_count()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert threading.active_count() == before
