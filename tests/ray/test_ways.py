"""The two ways through the house are those of docs/ways.md, short, and never called back."""

from __future__ import annotations

from tests import ways


def test_ways_through_the_house_are_short_and_as_the_page_says() -> None:
    job, gradient = ways.way_of_a_job(), ways.way_of_a_gradient()
    for way, most in ((job, ways.MOST_JOB), (gradient, ways.MOST_GRADIENT)):
        assert len(ways.hops(way)) <= most
        assert {what: ways.entered_twice(stack) for what, stack in way.items()} == {
            what: [] for what in way
        }
    written = ways.PAGE.read_text()
    assert ways.page(job, gradient) == written, "python -m tests.ways write, and look at it"
