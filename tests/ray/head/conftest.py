"""One head for all modules here, with a folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.heads import Head, started


@pytest.fixture(scope="package")
def head(ray_token: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head that asks for the token of these tests."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    try:
        with started(folder, tmp_path_factory.mktemp("head")) as one:
            yield one
    finally:
        shutil.rmtree(folder, ignore_errors=True)
