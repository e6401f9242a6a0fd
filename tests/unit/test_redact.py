"""What a process knows to be secret is taken out of every text."""

from __future__ import annotations

import time

import pytest

from raycloud import redact
from raycloud.events import GenerationFormed, MemberFailed, MemberLost
from raycloud.redact import (
    is_secret_name,
    know,
    redact_text,
    redacted,
    secrets_among,
    secrets_in,
)


@pytest.fixture(autouse=True)
def knowing_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test knows, no other does."""
    monkeypatch.setattr(redact, "_known", set())
    monkeypatch.setattr(redact, "_known_pattern", [])


def test_what_is_known_is_taken_out_wherever_it_stands() -> None:
    assert redact_text("the key is Tr0ub4dor&3, isn't it") == "the key is Tr0ub4dor&3, isn't it"
    know(["Tr0ub4dor&3", "Tr0ub4dor&3-longer", "abc", "horse"])
    assert redact_text("xTr0ub4dor&3x") == "x[redacted]x"
    assert redact_text("Tr0ub4dor&3-longer") == "[redacted]"
    assert redact_text("abc") == "abc"  # too short to tell from a word
    assert redact_text("a horse, not horses") == "a [redacted], not horses"
    assert redact_text("[redacted]") == "[redacted]"


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("AWS_SECRET_ACCESS_KEY", "/abc+def", {"/abc+def"}),
        ("HF_TOKEN", "abcdef", {"abcdef"}),
        ("HF_TOKEN", "abc", set()),
        ("MAX_TOKEN", "4096", set()),
        ("PGPASSWORD", "hunter2", {"hunter2"}),
        ("MYSQL_PWD", "hunter2", {"hunter2"}),
        ("PWD", "/somewhere/else", set()),
        ("GOOGLE_APPLICATION_CREDENTIALS", __file__, set()),
        ("DATABASE_URL", "pg://me:hunter2@h/d", {"hunter2"}),
        ("PIP_INDEX_URL", "https://token99@h/simple", {"token99"}),
        ("SHELL", "hunter2", set()),
    ],
)
def test_secrets_of_an_environment(name: str, value: str, found: set[str]) -> None:
    assert secrets_among({name: value}) == found


def test_secrets_of_a_url_in_each_spelling() -> None:
    assert set(secrets_in("s3://k:a%2Fb@h?x=1&X-Amz-Signature=s%20t")) == {
        "a%2Fb", "a/b", "s%20t", "s t",
    }  # fmt: skip
    assert not set(secrets_in("no://credentials/here?id=1"))


def test_an_event_keeps_its_kind_and_its_numbers() -> None:
    know(["Tr0ub4dor"])
    event = MemberFailed(member=3, error="TaskError", message="x Tr0ub4dor", hint="")
    assert redacted(event) == MemberFailed(
        member=3, error="TaskError", message="x [redacted]", hint=""
    )
    plain = MemberLost(member=1, reason="gone")
    assert redacted(plain) is plain


def test_the_name_of_a_secret_is_none() -> None:
    for text in ("https://me:${PW}@h/a?token=${T}", "api_key='${KEY}'", "s3://${TOKEN}@h"):
        assert redact_text(text) == text


def test_all_below_a_secret_s_name_is_taken_out() -> None:
    said = {
        "credentials": {"user": "me", "pass": ["hunter2", {"pin": "x"}], "tries": 3},
        "api_keys": ["abcd1234", "${KEY}"],
        "deep": [{"hf_token": {"value": "abcd"}, "name": "plain"}],
    }
    assert redact.redact(said) == {
        "credentials": {"user": "[redacted]", "pass": ["[redacted]", {"pin": "[redacted]"}],
                        "tries": 3},
        "api_keys": ["[redacted]", "[redacted]"],
        "deep": [{"hf_token": {"value": "[redacted]"}, "name": "plain"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("my-own.scheme+x://me:hunter2@h", "my-own.scheme+x://[redacted]@h"),
        ("x" * 50 + "://me:hunter2@h", "x" * 50 + "://[redacted]@h"),
        ("MY_PASSWORD_2=hunter2 --db-password='hunter2'",
         "MY_PASSWORD_2=[redacted] --db-password='[redacted]'"),
        ("the eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "the [redacted]"),
        ("passwords are words, and http://host:80/a@b is a place",) * 2,
    ],
)  # fmt: skip
def test_what_has_the_shape_of_a_secret(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    "part",
    ["a.", "a-", "a_", "a://a:", "x://", "password", "secret_", "eyJaaaaaaaa-", "eyJaaaaaaaa.",
     "-eyJ", "token='a", "-----BEGIN ", "bearer ", "?a", "sk-"],
)  # fmt: skip
def test_no_text_takes_long(part: str) -> None:
    """Each of these is 256 KiB long, held against a harmless one; what goes back takes hours."""

    def took_s(text: str) -> float:
        began_s = time.process_time()
        redact_text(text)
        list(secrets_in(text))
        is_secret_name(text)
        return time.process_time() - began_s

    letters = 2**18
    harmless_s = took_s(("the quick brown fox, " * letters)[:letters])
    assert took_s((part * letters)[:letters]) < 50 * harmless_s


def test_a_record_without_secrets_is_the_same_one() -> None:
    formed = GenerationFormed(
        generation=0, members=(0, 1), shares=(5, 3), first_step=0, keys=((0, 0), (1, 0))
    )
    assert redacted(formed) is formed
