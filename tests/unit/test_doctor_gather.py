"""What is gathered on this machine, with faults that are really there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud.cli import app
from raycloud.doctor import Gpus, Settings, examine, facts_here, gather


def found(variables: dict[str, str]) -> dict[str, str]:
    """Findings of this machine with these variables: values by name."""
    return {one.name: one.value for one in examine(facts_here(Settings.from_mapping(variables)))}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a token that only its owner reads."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o700)
    token.write_text("a" * 64)
    token.chmod(0o600)
    return tmp_path


def test_a_home_that_nobody_knows() -> None:
    odd = "~nobody-is-called-so/here"
    assert gather.disk(Path(odd)).total_bytes > 0
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": odd, "RAY_TMPDIR": odd}
    assert "token-missing" in found(variables)


def test_no_token_where_one_is_asked_for(tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    assert "token-missing" in found(variables)
    assert "token-missing" not in found(variables | {"RAY_AUTH_TOKEN": "x"})
    named = found(variables | {"RAY_AUTH_TOKEN_PATH": "/nowhere"})
    assert "/nowhere" in named["token-missing"]


@pytest.mark.parametrize(
    ("mode", "name"), [("disabled", "auth-off"), ("Token", ""), ("on", "auth-mode-unknown")]
)
def test_the_mode(mode: str, name: str, home: Path) -> None:
    names = found({"HOME": str(home), "RAY_AUTH_MODE": mode})
    assert names.keys() & {"auth-off", "auth-mode-unknown"} == ({name} if name else set())


def test_a_temporary_folder_that_is_too_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    assert str(deep) in found({"RAY_TMPDIR": str(deep)})["temp-too-long"]


def test_a_temporary_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("")
    assert found({"RAY_TMPDIR": str(file)})["temp-not-writable"] == str(file)
    assert found({"RAY_TMPDIR": str(file / "below")})["temp-not-writable"] == str(file / "below")


def test_what_is_required_is_what_is_declared() -> None:
    asked = gather.requirements()
    assert asked.keys() == {"python", "ray", "torch"}
    assert all(">=" in text for text in asked.values())
    assert not found({}).keys() & {"version-unsuited", "library-missing"}


def test_the_command_tells_a_script(home: Path) -> None:
    variables = {"HOME": str(home), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": ""}
    result = CliRunner().invoke(app, ["doctor", "--json"], env=variables)
    record = json.loads(result.stdout)
    assert result.exit_code == record["exit_code"]
    assert result.exit_code in {2, 3}  # 3 where this machine has a fault of its own
    assert "auth-off" in {one["name"] for one in record["findings"]}
    assert "a" * 64 not in result.stdout


def test_links_are_those_of_a_cluster() -> None:
    result = CliRunner().invoke(app, ["doctor", "--links"], env={"RAY_ADDRESS": ""})
    assert result.exit_code == 2
    assert "--address" in result.stderr


def test_a_node_says_what_its_raylet_was_started_with(tmp_path: Path) -> None:
    raylet = tmp_path / "7"
    raylet.mkdir()
    (raylet / "cmdline").write_bytes(b"/x/raylet\0--port=1\0--temp_dir=/data/ray\0--head\0")
    (raylet / "environ").write_bytes(b"HOME=/h\0RAY_AUTH_MODE=Token\0")
    machine, settings = gather.node_here("node a", raylet=7, gpus=Gpus(), proc=tmp_path)
    assert (machine.name, machine.temp.path) == ("node a", "/data")
    assert settings is not None
    assert settings.auth_mode == "token"


def test_a_raylet_that_may_not_be_seen(tmp_path: Path) -> None:
    machine, settings = gather.node_here("node a", raylet=7, gpus=Gpus(), proc=tmp_path)
    assert (machine.temp.path, settings) == ("/tmp", None)
