"""Whom the command line speaks to: nobody but this machine without a token, or in clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.on_ray.submission import Endpoint, endpoint
from raycloud.spec import Environment
from raycloud.spec.environment import ray_token

TOKEN = "0f" * 32
FAR = ("head.example", "192.0.2.7", "[2001:db8::7]", "127.0.0.1.example", "localhost.example")
HERE = ("localhost", "127.0.0.1", "127.9.9.9", "[::1]")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def decided(address: str | None, *, insecure: bool = False, **variables: str) -> Endpoint:
    return endpoint(
        address, insecure=insecure, environment=Environment.from_mapping(dict(variables))
    )


@pytest.mark.parametrize("host", HERE)
def test_this_machine_needs_neither_token_nor_tls(host: str) -> None:
    for address in (f"http://{host}:8265", f"{host}:8265", f"https://{host}:8265/"):
        found = decided(address)
        assert found.headers == {}
        assert found.url.endswith(f"://{host}:8265")
    assert decided(f"{host}:1", RAY_AUTH_TOKEN=TOKEN).headers == {
        "Authorization": f"Bearer {TOKEN}"
    }


@pytest.mark.parametrize("host", FAR)
def test_elsewhere_a_token_is_wanted(host: str) -> None:
    for insecure in (False, True):
        with pytest.raises(SpecError, match="no token to show") as raised:
            decided(f"https://{host}", insecure=insecure)
        assert "RAY_AUTH_TOKEN" in raised.value.hint
    assert decided(f"https://{host}", RAY_AUTH_TOKEN=TOKEN).token == TOKEN


@pytest.mark.parametrize("host", FAR)
def test_elsewhere_nothing_goes_in_clear_unless_asked(host: str) -> None:
    for address in (f"http://{host}:8265", f"{host}:8265"):
        with pytest.raises(SpecError, match="in clear") as raised:
            decided(address, RAY_AUTH_TOKEN=TOKEN)
        assert "--insecure" in raised.value.hint
        assert "ssh -L" in raised.value.hint
        assert decided(address, insecure=True, RAY_AUTH_TOKEN=TOKEN).token == TOKEN


@pytest.mark.parametrize(
    "address",
    [
        "ray://127.0.0.1:10001", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999",
        "http://127.0.0.1:8265/api", "http://127.0.0.1:8265?x=1", "http://[::1", "auto://x",
    ],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(SpecError) as raised:
        decided(address, RAY_AUTH_TOKEN=TOKEN)
    assert raised.value.field == "--address"
    assert raised.value.hint


def test_a_password_in_an_address_is_refused_and_not_told() -> None:
    with pytest.raises(SpecError) as raised:
        decided("https://me:hunter2@head.example", RAY_AUTH_TOKEN=TOKEN)
    assert "hunter2" not in str(raised.value)


def test_where_the_address_comes_from() -> None:
    assert decided(None).url == "http://127.0.0.1:8265"
    assert decided(None, RAY_ADDRESS="127.0.0.1:6379").url == "http://127.0.0.1:8265"
    assert decided(None, RAY_ADDRESS="http://127.0.0.1:1").url == "http://127.0.0.1:1"
    both = {"RAY_ADDRESS": "http://127.0.0.1:1", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:2"}
    assert decided(None, **both).url == "http://127.0.0.1:2"
    assert decided("127.0.0.1:3", **both).url == "http://127.0.0.1:3"


def test_the_token_is_found_in_rays_order(home: Path) -> None:
    def found(**variables: str) -> str | None:
        return ray_token(Environment.from_mapping(variables))

    assert found() is None
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("kept\n")
    (home / "named").write_text("  named\n")
    assert found() == "kept"
    assert found(RAY_AUTH_TOKEN_PATH="~/named") == "named"
    assert found(RAY_AUTH_TOKEN="said", RAY_AUTH_TOKEN_PATH="~/named") == "said"
    (home / "named").write_text("")
    assert found(RAY_AUTH_TOKEN_PATH="~/named") is None


def test_a_token_that_is_none_is_refused_and_not_told(home: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        ray_token(Environment.from_mapping({"RAY_AUTH_TOKEN_PATH": "~/gone"}))
    for token in ("two words", "line\r\nX-Evil: 1", "schlüssel"):
        with pytest.raises(SpecError, match="is no token") as raised:
            ray_token(Environment.from_mapping({"RAY_AUTH_TOKEN": token}))
        assert token not in str(raised.value)


def test_no_record_shows_the_token() -> None:
    environment = Environment.from_mapping({"RAY_AUTH_TOKEN": TOKEN})
    assert TOKEN not in repr(environment)
    assert TOKEN not in repr(endpoint("127.0.0.1:1", environment=environment))


def test_the_certificates_that_a_server_is_checked_with(home: Path) -> None:
    (home / "own.pem").write_text("")
    named = {"RAY_AUTH_TOKEN": TOKEN, "CURL_CA_BUNDLE": str(home)}
    assert decided("https://head.example", **named).certificates == home
    named["REQUESTS_CA_BUNDLE"] = str(home / "own.pem")
    assert decided("https://head.example", **named).certificates == home / "own.pem"
    assert decided("https://head.example", RAY_AUTH_TOKEN=TOKEN).certificates is None
    named["REQUESTS_CA_BUNDLE"] = str(home / "gone.pem")
    with pytest.raises(SpecError, match="neither a file nor a folder") as raised:
        decided("https://head.example", **named)
    assert raised.value.field == "REQUESTS_CA_BUNDLE"
    assert decided("http://127.0.0.1:8265", **named).certificates is None
