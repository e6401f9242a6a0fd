"""When others begin to read, beside the process that has begun."""

from __future__ import annotations

import pytest

from raycloud.on_ray.read_tasks import _pays


@pytest.mark.parametrize(
    ("spent_s", "made", "left", "first", "expected"),
    [
        ((2.9, 2.9), 0, 1000, True, False),  # the task may still be loading
        ((3.1, 3.1), 0, 64, True, True),  # it computes: each block may take as long
        ((3.1, 3.1), 0, 1, True, False),  # others could only wait for the only one
        ((3.1, 0.1), 0, 3, True, False),  # it waits for the files' store: 10 s at least
        ((1.0, 0.04), 0, 2, False, False),  # none is made since: not without end, 2 s at least
        ((0.4, 0.4), 1, 1000, False, False),  # too soon to say
        ((1.0, 0.9), 10, 40, False, True),  # 4 s of work are left, and a start takes 3
        ((1.0, 0.9), 20, 40, False, False),
        ((1.0, 0.1), 10, 200, False, False),  # 20 s of waiting
        ((1.0, 0.1), 10, 400, False, True),
    ],
)
def test_others_begin_where_they_save_more_than_their_start(
    spent_s: tuple[float, float], made: int, left: int, *, first: bool, expected: bool
) -> None:
    assert _pays(spent_s, made=made, left=left, first=first) is expected
