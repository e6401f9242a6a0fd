"""Text as bytes: windows, whole files held out, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.data.text import Windows, read_text, standard_library
from raycloud.errors import DataError


def text(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)


def fill(root: Path, count: int) -> dict[str, bytes]:
    """Files of different content, in folders."""
    made = {}
    for i in range(count):
        file = root / f"folder-{i % 7}" / f"{i:03}.txt"
        file.parent.mkdir(exist_ok=True)
        made[str(file)] = f"<{i:03}>".encode() * (1 + i % 3)
        file.write_bytes(made[str(file)])
    return made


def test_windows_overlap_by_the_byte_to_predict() -> None:
    windows = Windows(text(b"abcdefghij"), 3)
    assert [bytes(windows[i]) for i in range(len(windows))] == [b"abcd", b"defg", b"ghij"]
    assert windows[0].dtype == np.uint8


@given(st.binary(min_size=2, max_size=60), st.integers(1, 20))
def test_every_byte_but_the_first_is_predicted_once(content: bytes, length: int) -> None:
    if len(content) <= length:
        return
    windows = Windows(text(content), length)
    every = [windows[i] for i in range(len(windows))]
    assert all(len(window) == length + 1 for window in every)
    predicted = b"".join(bytes(window[1:]) for window in every)
    assert content[1:].startswith(predicted)
    assert len(content) - 1 - len(predicted) < length


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_there_is_no_window_outside(index: int) -> None:
    with pytest.raises(IndexError, match=f"window {index} of 3"):
        Windows(text(b"abcdefghij"), 3)[index]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_text_shorter_than_a_window_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"{size} bytes is too short for a window of 3") as refused:
        Windows(text(b"x" * size), 3)
    assert "shorter window" in refused.value.hint
    assert len(Windows(text(b"xxxx"), 3)) == 1


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    file = tmp_path / "book.any"
    file.write_bytes(content)
    corpus = read_text(str(file))
    assert bytes(corpus.train) + bytes(corpus.held_out) == content
    assert len(corpus.held_out) == len(content) // 20


def test_of_a_directory_whole_files_are_held_out(tmp_path: Path) -> None:
    made = fill(tmp_path, 200)
    corpus = read_text(tmp_path)
    train, held_out = bytes(corpus.train), bytes(corpus.held_out)
    assert len(train) + len(held_out) == sum(map(len, made.values()))
    for content in made.values():
        assert (content in train) != (content in held_out)
    assert 0.01 < len(held_out) / len(train) < 0.15


def test_the_choice_is_by_name_alone(tmp_path: Path) -> None:
    made = fill(tmp_path, 100)
    first = read_text(tmp_path)
    for file, content in made.items():
        Path(file).write_bytes(content.replace(b"<", b"["))
    (tmp_path / "left-out.bin").write_bytes(b"not text")
    second = read_text(tmp_path)
    assert bytes(first.held_out).replace(b"<", b"[") == bytes(second.held_out)
    assert bytes(first.train).replace(b"<", b"[") == bytes(second.train)


def test_a_place_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere' cannot be read: No such file") as refused:
        read_text(tmp_path / "nowhere")
    assert "data.path" in refused.value.hint


@pytest.mark.parametrize("names", [[], ["picture.png"], ["one.txt"]])
def test_a_directory_with_too_few_texts(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"content")
    with pytest.raises(DataError, match="too few text files") as refused:
        read_text(tmp_path)
    assert ".txt" in refused.value.hint


def test_the_standard_library_is_a_corpus() -> None:
    corpus = standard_library()
    assert len(corpus.train) > 1_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2
    opening = bytes(corpus.held_out[:400])
    assert opening.strip()
    assert opening not in bytes(corpus.train)
    assert len(Windows(corpus.train, 256)) > 1000
    again = standard_library()
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.held_out, again.held_out)
