"""Stores on other machines: a real S3-speaking server, HTTP, and what happens when they fail."""

from __future__ import annotations

import io
from collections.abc import Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from raycloud.data.clean import clean
from raycloud.data.filesystems import FsspecTree, roots_of
from raycloud.data.index import Input
from raycloud.data.location import locate, open_file
from raycloud.data.slices import cut, read
from raycloud.errors import DataError
from raycloud.task import Source
from tests.stores import Store, serving

SECRET = "hunter2/+secret"
KEY = "AKIAIOSFODNN7EXAMPLE"


def parquet(count: int, first: int = 0) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(first, first + count)}), sink, row_group_size=100)
    return sink.getvalue()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    system = s3(url)
    system.create_dir("bucket")
    for i in range(2):
        with system.open_output_stream(f"bucket/data/part {i}.parquet") as file:
            file.write(parquet(300, 300 * i))
    with system.open_output_stream("bucket/data/_SUCCESS") as file:
        file.write(b"")
    yield url
    server.stop()


def s3(url: str, attempts: int = 3) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        endpoint_override=url,
        region="us-east-1",
        allow_bucket_creation=True,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
    )


def values(source: Source, pause: object = None) -> list[int]:
    waits: list[float] = []
    act = waits.append if pause is None else pause
    found = [Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source, pause=act)]
    out: list[int] = []
    for piece in cut(source, found, pause=act):
        cleaned = clean(source, lambda rows: rows, read(source, piece, pause=act), skip=False)
        for table in cleaned.tables:
            out += table["x"].to_pylist()
    return out


def url_of(endpoint: str, path: str = "bucket/data") -> str:
    return f"s3://{KEY}:hunter2%2F%2Bsecret@{path}?endpoint_override={endpoint}&region=us-east-1"


def test_files_of_a_bucket_are_read_by_their_url(moto: str) -> None:
    source = Source(path=url_of(moto))
    files = locate(source)
    assert [file.path for file in files] == [f"s3://bucket/data/part {i}.parquet" for i in (0, 1)]
    assert files[0].bytes == len(parquet(300))
    assert files[0].modified_ns is not None
    assert values(source) == list(range(600))


def test_a_pattern_in_a_bucket(moto: str) -> None:
    source = Source(path=url_of(moto, "bucket/*/part 1*"), format="parquet")
    assert values(source) == list(range(300, 600))


def test_a_given_file_system_is_used(moto: str) -> None:
    source = Source(path="bucket/data", filesystem=s3(moto))
    assert locate(source)[0].path == "s3://bucket/data/part 0.parquet"
    assert values(source) == list(range(600))


def test_nothing_in_a_bucket(moto: str) -> None:
    with pytest.raises(DataError, match="no files are found at 's3://bucket/nothing") as refused:
        locate(Source(path=url_of(moto, "bucket/nothing")))
    assert "hunter2" not in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("only", ["HEAD", "GET"])
def test_a_bucket_that_fails_twice_is_asked_again(moto: str, only: str) -> None:
    with serving(Store(upstream=moto, failures=2, only=only)) as store:
        waits: list[float] = []
        source = Source(path="bucket/data", filesystem=s3(store.url, attempts=1))
        assert values(source, waits.append) == list(range(600))
        assert store.failures == 0
        assert waits == [0.5, 2.0]


def test_a_bucket_that_goes_on_failing(moto: str) -> None:
    with serving(Store(upstream=moto)) as store:
        source = Source(path="bucket/data", filesystem=s3(store.url, attempts=1))
        files = locate(source)
        store.failures = 100
        with pytest.raises(
            DataError, match=r"'s3://bucket/data/part 0.parquet' cannot be read after 3 tries.*503"
        ):
            open_file(source, files[0].path, pause=lambda _: None)


def test_a_bucket_that_is_not_ours(moto: str) -> None:
    with serving(Store(upstream=moto, failures=100, status=403)) as store:
        source = Source(path="bucket/data/part 0.parquet", filesystem=s3(store.url, attempts=1))
        waits: list[float] = []
        with pytest.raises(DataError, match="may not be read") as refused:
            locate(source, pause=waits.append)
    assert waits == []
    assert "credentials" in refused.value.hint


def test_files_behind_http() -> None:
    files = {f"/data/{i}.parquet": parquet(300, 300 * i) for i in range(2)}
    with serving(Store(files=files)) as store:
        paths = [f"{store.url}{name}" for name in files]
        found = locate(Source(path=paths))
        assert [file.path for file in found] == paths
        assert found[0].tag == '"1"'
        assert values(Source(path=paths)) == list(range(600))


def test_of_parquet_behind_http_no_more_is_read_than_it_has() -> None:
    """By itself fsspec reads 5 MiB ahead; small row groups are asked for together."""
    sink = io.BytesIO()
    noise = np.random.default_rng(0).integers(2**62, size=2_000_000)
    pq.write_table(pa.table({"x": noise}), sink, row_group_size=5_000, compression="none")
    whole = sink.getvalue()
    with serving(Store(files={"/a.parquet": whole})) as store:
        source = Source(path=f"{store.url}/a.parquet")
        found = [Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source)]
        pieces = cut(source, found)
        rows = [part.table["x"].to_numpy() for piece in pieces for part in read(source, piece)]
    assert np.array_equal(np.concatenate(rows), noise)
    assert store.sent <= 1.1 * len(whole)
    assert len(store.asked) <= 20


def test_a_small_file_of_parquet_is_asked_for_once() -> None:
    with serving(Store(files={"/a.parquet": parquet(300)})) as store:
        source = Source(path=f"{store.url}/a.parquet")
        [file] = [Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source)]
        before = len(store.asked)
        [piece] = [part for whole in cut(source, [file]) for part in read(source, whole)]
        assert piece.table["x"].to_pylist() == list(range(300))
        assert sum(one.startswith("GET") for one in store.asked[before:]) <= 2


def test_a_file_system_keeps_the_cache_that_it_was_given() -> None:
    given = fsspec.filesystem("http", cache_type="blockcache", cache_options={"maxblocks": 8})
    with serving(Store(files={"/a.parquet": parquet(300)})) as store:
        file = FsspecTree(given).open(f"{store.url}/a.parquet", ahead=False)
        assert pq.read_table(file)["x"].to_pylist() == list(range(300))


def test_a_page_of_links_is_a_directory() -> None:
    page = b'<a href="a.csv">a</a> <a href="b.csv">b</a> <a href="notes.pdf">n</a>'
    files = {"/data/": page, "/data/a.csv": b"x\n1\n", "/data/b.csv": b"x\n2\n"}
    with serving(Store(files={**files, "/data/notes.pdf": b""})) as store:
        found = locate(Source(path=f"{store.url}/data/"))
        assert [file.path for file in found] == [f"{store.url}/data/{n}.csv" for n in "ab"]
        assert values(Source(path=f"{store.url}/data/")) == [1, 2]


@pytest.mark.parametrize(
    ("after", "only", "expected"),
    [
        ("found", "", [0.5]),  # HEAD, then GET, of one try
        ("cut", "", [0.5]),
        ("opened", "", [0.5]),
        ("opened", "GET", [0.5, 2.0]),
    ],
)
def test_a_server_that_answers_503_twice(after: str, only: str, expected: list[float]) -> None:
    with serving(Store(files={"/a.parquet": parquet(300)}, only=only)) as store:
        source = Source(path=f"{store.url}/a.parquet")
        waits: list[float] = []
        store.failures = 2 * (after == "found")
        found = [
            Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source, pause=waits.append)
        ]
        store.failures += 2 * (after == "cut")
        (piece,) = cut(source, found, pause=waits.append)
        store.failures += 2 * (after == "opened")
        rows = [p.table["x"].to_pylist() for p in read(source, piece, pause=waits.append)]
        assert [x for part in rows for x in part] == list(range(300))
        assert store.failures == 0
        assert waits == expected


def test_a_server_that_goes_on_answering_503() -> None:
    with serving(Store(files={"/a.csv": b"x\n1\n"}, failures=1000)) as store:
        url = store.url.replace("http://", "http://me:hunter2@") + "/a.csv?token=hunter2"
        with pytest.raises(DataError, match="cannot be read after 3 tries: 503") as refused:
            locate(Source(path=url), pause=lambda _: None)
    assert "/a.csv" in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("status", "words"), [(404, "no files are found"), (403, "may not be read")]
)
def test_a_file_that_is_not_to_be_had(status: int, words: str) -> None:
    with serving(Store(files={"/a.csv": b"x\n1\n"}, failures=1000, status=status)) as store:
        waits: list[float] = []
        with pytest.raises(DataError, match=words):
            locate(Source(path=f"{store.url}/a.csv"), pause=waits.append)
    assert waits == []


def test_a_file_that_shrank_is_refused() -> None:
    with serving(Store(files={"/a.jsonl": b'{"x": 1}\n' * 10})) as store:
        source = Source(path=f"{store.url}/a.jsonl")
        found = [Input(path=f.path, bytes=f.bytes, digest="") for f in locate(source)]
        (piece,) = cut(source, found)
        store.files["/a.jsonl"] = b'{"x": 1}\n'
        with pytest.raises(DataError, match=r"has changed: it was of 90 bytes .* is of 9"):
            list(read(source, piece))


def test_a_google_bucket_is_named_by_its_url() -> None:
    (root,) = roots_of(Source(path="gs://anonymous@bucket/folder/*.csv?retry_limit_seconds=1"))
    assert (root.name, root.path) == ("gs://bucket/folder", "bucket/folder/*.csv")
    assert root.named("bucket/folder/a.csv") == "gs://bucket/folder/a.csv"
