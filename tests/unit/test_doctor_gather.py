"""What is gathered on this machine, with faults that are really there."""

from __future__ import annotations

import base64
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud.cli import app
from raycloud.doctor import Settings, access, examine, facts_here, gather, proc
from raycloud.doctor.facts import Health
from raycloud.doctor.proc import Program

GCS = "/x/gcs_server --config_list={} --session-name=session_1 --gcs_server_port=1 "
RAYLET = "/x/raylet --gcs-address=h:1 --session_name=session_1 {} "


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


def test_a_private_token_is_well_and_stays_unread(home: Path) -> None:
    names = found({"HOME": str(home), "RAY_AUTH_MODE": "token"})
    assert names["token"] == f"{home}/.ray/auth_token: mode 0600"
    assert not names.keys() & {"token-readable", "token-foreign", "token-empty", "token-missing"}
    assert "a" * 64 not in str(names)


def test_a_token_that_others_read(home: Path) -> None:
    (home / ".ray" / "auth_token").chmod(0o644)
    assert found({"HOME": str(home)})["token-readable"].endswith("mode 0644")


def test_a_token_that_others_replace(home: Path) -> None:
    (home / ".ray").chmod(0o777)
    assert "0777" in found({"HOME": str(home)})["token-foreign"]


def test_a_token_without_content(home: Path) -> None:
    (home / ".ray" / "auth_token").write_text("")
    assert "token-empty" in found({"HOME": str(home)})


def test_a_home_that_nobody_knows() -> None:
    odd = "~nobody-is-called-so/here"
    assert gather.token_file(Path(odd)) is None
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


def test_encryption_without_its_files(home: Path) -> None:
    key = home / "key"
    key.write_text("")
    variables = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_KEY": str(key), "RAY_TLS_CA_CERT": "/no"}
    findings = examine(facts_here(Settings.from_mapping({"HOME": str(home)} | variables)))
    broken = {one.where: one.value for one in findings if one.name == "tls-incomplete"}
    assert broken == {"RAY_TLS_SERVER_CERT": "not set", "RAY_TLS_CA_CERT": "/no"}


def test_a_temporary_folder_that_is_too_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60)
    assert str(deep) in found({"RAY_TMPDIR": str(deep)})["temp-too-long"]


def test_a_temporary_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("")
    assert found({"RAY_TMPDIR": str(file)})["temp-not-writable"] == str(file)
    assert found({"RAY_TMPDIR": str(file / "below")})["temp-not-writable"] == str(file / "below")


def test_an_interface_that_is_not_there() -> None:
    assert found({"NCCL_SOCKET_IFNAME": "nosuch"})["interface-absent"].startswith("nosuch; ")
    for there in ("lo", "=lo", "nosuch,l", "^nosuch"):
        assert "interface-absent" not in found({"NCCL_SOCKET_IFNAME": there})
    assert "interface-absent" in found({"NCCL_SOCKET_IFNAME": "=l"})


@pytest.fixture
def few_files() -> Iterator[None]:
    """This process may open few files only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_few_files() -> None:
    assert found({})["open-files-few"].startswith("512,")


@pytest.mark.parametrize(
    ("address", "wide"), [("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)]
)
def test_a_port_that_another_program_has(
    address: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        server.listen()
        port = server.getsockname()[1]
        # Another program may have the same port of another address.
        (seen,) = [one for one in proc.listeners([]) if (one.port, one.address) == (port, address)]
        assert (seen.program, seen.wide) == ("", wide)
        monkeypatch.setattr(access, "FIXED_PORTS", {port: "gcs_server"})
        assert found({})["port-taken"] == f"{port} (gcs_server)"
        own = Program(pid=os.getpid(), parent=1, kind="gcs_server", line="")
        assert "gcs_server" in {one.program for one in proc.listeners([own]) if one.port == port}
    assert not [one for one in proc.listeners([]) if one.port == port]


def test_what_is_required_is_what_is_declared() -> None:
    asked = gather.requirements()
    assert asked.keys() == {"python", "ray", "torch"}
    assert all(">=" in text for text in asked.values())
    assert not found({}).keys() & {"version-unsuited", "library-missing"}


def test_processes_of_one_node_among_several() -> None:
    head = Program(pid=2, parent=1, kind="raylet", line=RAYLET.format("--head"))
    gcs = Program(pid=3, parent=1, kind="gcs_server", line=GCS.format("e30="))
    client = Program(pid=4, parent=1, kind="Ray client server", line="ray --address=h:1 --port=2")
    worker = Program(pid=5, parent=2, kind="worker", line="ray::IDLE")
    second = Program(pid=6, parent=1, kind="raylet", line=RAYLET.format(""))
    theirs = Program(pid=7, parent=6, kind="worker", line="ray::IDLE")
    other = Program(pid=8, parent=1, kind="gcs_server", line="/x/gcs_server --session-name=s_2 ")
    everything = [head, gcs, client, worker, second, theirs, other]
    assert proc.of_node(everything, 2) == [head, gcs, client, worker]
    assert proc.of_node(everything, 6) == [second, theirs]
    assert proc.of_node(everything, 99) == []


def test_health_by_configuration_then_environment_then_default() -> None:
    written = base64.b64encode(json.dumps({"health_check_period_ms": 7}).encode()).decode()
    head = Program(pid=1, parent=0, kind="gcs_server", line=GCS.format(written))
    variables = {
        "RAY_health_check_period_ms": "8",
        "RAY_health_check_timeout_ms": "9",
        "RAY_health_check_failure_threshold": "many",
    }
    assert proc.health_of(head, variables) == Health(period_ms=7, timeout_ms=9, threshold=5)
    broken = Program(pid=1, parent=0, kind="gcs_server", line=GCS.format("%%%"))
    assert proc.health_of(broken, {}) == Health()


def test_processes_that_may_not_be_seen(tmp_path: Path) -> None:
    assert proc.environment_of(1, tmp_path) is None
    assert proc.open_files(1, tmp_path) == 0
    assert proc.listeners([], tmp_path) == ()
    assert proc.programs(tmp_path) == []


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
