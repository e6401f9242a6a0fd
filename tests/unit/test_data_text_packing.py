"""Windows of packed documents: every token but the first is predicted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.data.text import pack


@given(
    texts=st.lists(st.binary(max_size=12), max_size=12),
    length=st.integers(1, 9),
    separator=st.sampled_from([b"", b"|", b"<>"]),
    pad=st.sampled_from([None, 0]),
)
def test_every_target_appears_once(
    texts: list[bytes], length: int, separator: bytes, pad: int | None
) -> None:
    stream = separator.join(texts)
    packed = pack(texts, length, separator=separator, pad=pad)
    assert packed.windows.shape == (len(packed.counts), length + 1)
    pairs = zip(packed.windows, packed.counts, strict=True)
    predicted = b"".join(bytes(window[1 : count + 1]) for window, count in pairs)
    assert predicted == stream[1 : len(stream) - packed.dropped]
    assert packed.dropped < length
    if pad is not None:
        assert packed.dropped == 0
        assert all(
            (w[c + 1 :] == pad).all() for w, c in zip(packed.windows, packed.counts, strict=True)
        )
    for i, window in enumerate(packed.windows):
        held = stream[i * length : i * length + length + 1]
        assert bytes(window[: len(held)]) == held


def test_tokens_of_any_integer_type() -> None:
    texts = [np.array([70000, 1], np.uint32), np.array([2], np.uint32), np.array([], np.uint32)]
    packed = pack(texts, 2, separator=9, pad=0)
    assert packed.windows.dtype == np.uint32
    assert packed.windows.tolist() == [[70000, 1, 9], [9, 2, 9]]
    assert pack([[1, 2], [3]], 3, separator=[0, 0]).windows.tolist() == [[1, 2, 0, 0]]
    assert pack(["é"], 1, separator="").windows.tolist() == [list("é".encode())]


def test_nothing_to_pack() -> None:
    for texts in ([], [b""], [b"a"]):
        packed = pack(texts, 4, separator=b"")
        assert packed.windows.shape == (0, 5)
        assert packed.windows.dtype == np.uint8
        assert packed.dropped == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "length = 0"),
        ({"separator": 300}, r"separator = \[300\]: not all are tokens of type uint8"),
        ({"pad": 300, "texts": [b"abcd"]}, r"pad = \[300\]: not all"),
        ({"texts": [np.zeros((2, 2), int)]}, "1-D array of tokens"),
        ({"texts": [np.zeros(2)]}, "1-D array of tokens, not float64"),
    ],
)
def test_what_cannot_be_packed(arguments: dict[str, object], words: str) -> None:
    given_ = {"texts": [b"abcd"], "length": 2, "separator": b"|", "pad": None, **arguments}
    texts, length = given_.pop("texts"), given_.pop("length")
    with pytest.raises(ValueError, match=words):
        pack(texts, length, **given_)
