"""However often its driver is killed, a member's words are in the log once and in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raycloud.events import Noticed
from raycloud.worker.outbox import Outbox, OutboxEntry


class Driver:
    """Asks for words, writes them down one by one, and may be killed after any of them."""

    def __init__(self, words: Outbox, log: list[int]) -> None:
        self.words, self.log = words, log
        self.heard = max(log, default=0)
        words.resend(self.heard)

    def turn(self, killed_after: int | None) -> bool:
        """Whether it lives; the call that is on its way when it is killed is answered, too."""
        found: list[OutboxEntry] = self.words.take(self.heard)
        written = found if killed_after is None else found[:killed_after]
        self.log += [word.number for word in written]
        if killed_after is not None:
            self.words.take(self.heard)
            return False
        self.heard = max([self.heard, *(word.number for word in found)])
        return True


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.integers(0, 4)), min_size=1, max_size=40
    )
)
def test_each_word_is_written_once(turns: list[tuple[int, int | None]]) -> None:
    words, log, said = Outbox(0), [], 0
    driver = Driver(words, log)
    for more, killed_after in turns:
        words.add(Noticed(what=str(said + i)) for i in range(more))
        said += more
        if not driver.turn(killed_after):
            driver = Driver(words, log)
    driver.turn(None)
    assert log == list(range(1, said + 1))
    driver.turn(None)
    assert words._kept == type(words._kept)()
