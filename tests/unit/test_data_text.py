"""Text: sources of whole files, some held out; and windows of packed documents."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.data.text import pack, text_sources
from raycloud.errors import DataError
from raycloud.task import Source, Splits


def sources(splits: Splits) -> tuple[Source, Source]:
    assert isinstance(splits.train, Source)
    assert isinstance(splits.held_out, Source)
    return splits.train, splits.held_out


def test_of_a_directory_whole_files_are_held_out_by_name(tmp_path: Path) -> None:
    train, held_out = sources(text_sources(str(tmp_path)))
    assert (train.path, train.format, train.unit) == (str(tmp_path), "text", "file")
    names = [f"folder-{i % 7}/{i:03}.{s}" for i in range(500) for s in ("txt", "py", "md", "rst")]
    apart = [name for name in names if held_out.select(name)]
    assert 0.03 < len(apart) / len(names) < 0.07
    assert [name for name in names if train.select(name)] == [n for n in names if n not in apart]
    again = pickle.loads(pickle.dumps(held_out))
    assert [name for name in names if again.select(name)] == apart


@pytest.mark.parametrize("name", ["picture.png", "no-suffix", "folder.py/program"])
def test_only_text_is_taken(tmp_path: Path, name: str) -> None:
    assert not any(source.select(name) for source in sources(text_sources(str(tmp_path))))


@pytest.mark.parametrize("name", ["test/a.py", "json/tests/a.py", "site-packages/x/y.py", "a.txt"])
def test_of_the_standard_library_what_is_not_its_own_is_left_out(name: str) -> None:
    assert not any(source.select(name) for source in sources(text_sources(None)))


def test_the_standard_library_is_all_there() -> None:
    train, held_out = sources(text_sources(None))
    assert train.path == held_out.path
    assert Path(str(train.path), "json/decoder.py").is_file()
    for name in ("json/decoder.py", "test.py", "asyncio/events.py"):
        assert train.select(name) != held_out.select(name)


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    content = "".join(f"line {i}, größer\n" for i in range(100))
    file = tmp_path / "book.any"
    file.write_text(content)
    train, held_out = sources(text_sources(str(file)))
    (first,), (last,) = (s.dataset["text"].to_pylist() for s in (train, held_out))
    assert first + last == content
    assert len(last) == len(content) // 20
    assert train.dataset["path"].to_pylist() == [str(file)]


def test_a_single_file_is_known_by_its_content(tmp_path: Path) -> None:
    keys = []
    for name, content in (("a", "x" * 100), ("b", "x" * 100), ("c", "y" * 100)):
        (tmp_path / name).write_text(content)
        keys.append([source.key for source in sources(text_sources(str(tmp_path / name)))])
    assert keys[0] == keys[1]
    assert len({key for pair in keys for key in pair}) == 4


@pytest.mark.parametrize("size", [0, 1, 19])
def test_a_single_file_with_nothing_to_hold_out(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(b"x" * size)
    with pytest.raises(DataError, match=f"of {size} characters is too short") as refused:
        text_sources(str(file))
    assert "give more text" in refused.value.hint


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
