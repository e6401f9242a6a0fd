"""Secrets of a job: filled in from the environment, left out of what is kept, compared without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from raycloud.checkpoint import open_store
from raycloud.errors import SpecError
from raycloud.spec import Job, SpecErrors, check_resume, dump_job
from raycloud.spec.secrets import filled, kept, kept_word, literal, place_of, secrets_of
from raycloud.spec.sections import Section
from raycloud.spec.yaml_text import parse


def job(**fields: Any) -> Job:
    return Job(**({"task": "/p/a.py:B", "steps": 3} | fields))


def path_of(path: str) -> str | None:
    return kept(job(data={"path": path})).data.path


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("/data/a@b:c", "/data/a@b:c"),
        ("https://me:hunter2@host/a", "https://me:[redacted]@host/a"),
        ("https://me:hun/ter2@host/a", "https://me:[redacted]@host/a"),
        ("https://hunter2@host/a", "https://[redacted]@host/a"),
        ("https://h/a?id=1&token=hunter2#part", "https://h/a?id=1&token=[redacted]#part"),
        ("https://me:${PW}@host/a?token=${T}", "https://me:${PW}@host/a?token=${T}"),
        ("https://me:x${PW}@host/a", "https://me:[redacted]@host/a"),
        ("https://${TOKEN}@host/a", "https://${TOKEN}@host/a"),
        ("abfs://container@account.dfs.core.windows.net/a",) * 2,
        ("sftp://me@host/a", "sftp://me@host/a"),
        ("simplecache::https://me:hunter2@host/a", "simplecache::https://me:[redacted]@host/a"),
        ("s3://key:hunter2@b/a?endpoint_override=http://h:1",
         "s3://key:[redacted]@b/a?endpoint_override=http://h:1"),
    ],
)  # fmt: skip
def test_what_is_kept_of_a_location(written: str, shown: str) -> None:
    assert path_of(written) == shown
    assert path_of(shown) == shown


def test_what_is_kept_of_settings() -> None:
    settings = {
        "api_key": "hunter2",
        "hf_token": "${HF}",
        "pad_token": "<pad>",
        "inner": [{"password": "hunter2", "n": 7}],
        "credentials": {"user": "me", "pass": "hunter2", "more": [{"pin": "${PIN}"}]},
        "api_keys": ["abcd1234"],
        "database": "pg://me:hunter2@h/d",
        "slashed": "pg://me:hun/ter2@h/d",
        "other": "pg://me:${PW}@h/d",
        "prompt": "say ${name}: a token is a word",
    }
    assert kept(job(settings=settings)).settings == {
        "api_key": "[redacted]",
        "hf_token": "${HF}",
        "pad_token": "<pad>",
        "inner": [{"password": "[redacted]", "n": 7}],
        "credentials": {"user": "[redacted]", "pass": "[redacted]", "more": [{"pin": "${PIN}"}]},
        "api_keys": ["[redacted]"],
        "database": "pg://[redacted]@h/d",
        "slashed": "pg://[redacted]@h/d",
        "other": "pg://me:${PW}@h/d",
        "prompt": "say ${name}: a token is a word",
    }


def test_every_location_is_filled_from_the_environment() -> None:
    asked = job(
        data={"path": "https://me:${PW}@h/a?sig=${SIG}"},
        checkpoint={"path": "ftp://me:${PW}@h/c"},
        tracking={"mlflow": {"uri": "http://${PW}@h:1"}},
        settings={"api_key": "${KEY}", "prompt": "${PW}", "credentials": {"pass": ["${PW}"]}},
    )
    variables = {"PW": "a b/c", "SIG": "s=1", "KEY": "k/1"}
    told = filled(asked, variables)
    assert told.data.path == "https://me:a%20b%2Fc@h/a?sig=s%3D1"
    assert told.checkpoint.path == "ftp://me:a%20b%2Fc@h/c"
    assert told.tracking.mlflow.uri == "http://a%20b%2Fc@h:1"
    assert told.settings == {
        "api_key": "k/1",
        "prompt": "${PW}",
        "credentials": {"pass": ["a b/c"]},
    }
    assert secrets_of(told) == {"a b/c", "a%20b%2Fc", "s=1", "s%3D1", "k/1"}


def test_fields_that_hold_a_secret_themselves() -> None:
    fields: dict[str, Any] = {
        "settings": {"credentials": {"user": "me", "pin": "${PIN}"}, "note": "password=hunter2"},
        "data": {"path": "https://me:hunter2@h/a"},
        "checkpoint": {"path": "https://me:${PW}@h/c"},
        "tracking": {"mlflow": {"uri": "http://h?token=hunter2"}},
    }
    found = {
        "settings.credentials.user": "[redacted]",
        "settings.note": "password=[redacted]",
        "data.path": "https://me:[redacted]@h/a",
        "tracking.mlflow.uri": "http://h?token=[redacted]",
    }
    assert dict(literal(fields)) == dict(literal(job(**fields).model_dump())) == found
    assert dict(literal(kept(job(**fields)).model_dump())) == {}
    for odd in ({}, {"settings": 3, "data": "auto", "tracking": {"mlflow": None}}, {"data": None}):
        assert dict(literal(odd)) == {}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("settings.api_key=a b", "settings.api_key=[redacted]"),
        ("settings.credentials.pass=hunter2", "settings.credentials.pass=[redacted]"),
        ("--set=settings.api_key=hunter2", "--set=settings.api_key=[redacted]"),
        ("settings.api_key=${KEY}", "settings.api_key=${KEY}"),
        ("data.path=https://me:hun/ter2@h/a", "data.path=https://[redacted]@h/a"),
        ("--address=https://me:hunter2@h", "--address=https://[redacted]@h"),
        ("https://me:hunter2@h/job.yaml", "https://[redacted]@h/job.yaml"),
        ("--run-dir=/a/b c",) * 2,
        ("settings.pad_token=<pad>",) * 2,
    ],
)
def test_what_is_shown_of_a_command(word: str, shown: str) -> None:
    assert kept_word(word) == shown


@pytest.mark.parametrize("path", ["~/kept", "kept", "/elsewhere/kept", "memory://kept"])
def test_a_run_and_what_is_kept_of_it_name_one_place(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    asked = job(checkpoint={"path": path})
    place = parse(dump_job(asked)).value["checkpoint"]["path"]
    assert open_store(str(filled(asked, {}).checkpoint.path)).place == place


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_named(value: str | None) -> None:
    variables = {} if value is None else {"PW": value}
    with pytest.raises(SpecError) as caught:
        filled(job(data={"path": "https://me:${PW}@h/a"}), variables)
    assert caught.value.field == "data.path"
    assert "variable PW is not set" in caught.value.message
    assert caught.value.hint.startswith("set PW")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"data": {"path": "https://me:hunter2@h/a"}}, "data.path"),
        ({"checkpoint": {"path": "s3://hunter2@h/a"}}, "checkpoint.path"),
        ({"tracking": {"mlflow": {"uri": "http://h?token=hunter2"}}}, "tracking.mlflow.uri"),
        ({"settings": {"api_key": "hunter2"}}, "settings.api_key"),
        ({"settings": {"a": [{"u": "pg://me:hunter2@h"}]}}, "settings.a.0.u"),
    ],
)
def test_what_was_left_out_is_asked_for_again(fields: dict[str, Any], field: str) -> None:
    again = Job.model_validate(parse(dump_job(job(**fields))).value)
    with pytest.raises(SpecError, match="secrets are not kept") as caught:
        filled(again, {})
    assert caught.value.field == field
    assert "hunter2" not in str(caught.value)
    assert "raycloud train JOB --resume" in caught.value.hint


def test_a_job_without_secrets_is_itself() -> None:
    asked = job(settings={"width": 3, "names": ["a", "b"]}, data={"path": "s3://b/a"})
    assert kept(asked) == asked == filled(asked, {})
    assert secrets_of(asked) == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://me:${PW}@h/a", "https://me:hunter2@h/a"),
        ("https://me:old@h/a", "https://me:[redacted]@h/a"),
        ("https://h/a?token=1&x=2", "https://h/a?token=9&x=2"),
        ("s3://b/a", "s3://key:hunter2@b/a"),
    ],
)
def test_a_run_goes_on_with_another_password(one: str, other: str) -> None:
    assert place_of(one) == place_of(other)
    check_resume(job(data={"path": one}), job(data={"path": other}))
    check_resume(job(checkpoint={"path": one}), job(checkpoint={"path": other}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://me:a@h/a", "https://me:a@h/b"),
        ("https://h/a?x=1", "https://h/a?x=2"),
        ("abfs://c@a/x", "abfs://d@a/x"),
        ("sftp://me@h/x", "sftp://you@h/x"),
    ],
)
def test_a_run_does_not_go_on_elsewhere(one: str, other: str) -> None:
    with pytest.raises((SpecError, SpecErrors), match=r"data\.path"):
        check_resume(job(data={"path": one}), job(data={"path": other}))


def test_sections_stand_in_sections_alone() -> None:
    """`_changed` walks sections that are fields, not those in lists or mappings: there are none."""
    for section in (Job, *Section.__subclasses__()):
        for name, field in section.model_fields.items():
            inner = [kind for one in get_args(field.annotation) for kind in get_args(one)]
            held = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, Section)]
            assert not held, f"{section.__name__}.{name}"
