"""What each cloud says of a machine that it takes away, and how it is asked."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import SystemClock
from raycloud.errors import MachineError, SpecError
from raycloud.preemption import PreemptionNotice, clouds
from raycloud.preemption.clouds import CLOUDS, cloud_here, name_of
from tests import metadata_servers as servers
from tests.metadata_servers import answering

ACTION, REBALANCE = (
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/recommendations/rebalance",
)


class Clock(SystemClock):
    """At a known date."""

    def unix_s(self) -> float:
        return datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC).timestamp()


def moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(Clock().unix_s() + seconds, datetime.UTC)


# --- AWS ---


def interruption(seconds: float, action: str = "terminate") -> dict[str, str]:
    return {"action": action, "time": moment(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")}


def test_aws_asks_with_one_token_and_hears_nothing_while_there_is_nothing() -> None:
    there = servers.Aws()
    with answering(there) as running:
        one = clouds.Aws(running.client, Clock())
        assert [one.notice() for _ in range(3)] == [None] * 3
    assert running.paths() == ["/latest/api/token", *[ACTION, REBALANCE] * 3]


def test_aws_interrupts() -> None:
    there = servers.Aws(action=interruption(118))
    with answering(there) as running:
        leaving = clouds.Aws(running.client, Clock()).notice()
    reason = "AWS takes this spot instance back: terminate"
    assert leaving == PreemptionNotice(reason=reason, deadline_s=118.0)


@pytest.mark.parametrize(
    ("time", "deadline_s"),
    [
        (moment(-60).isoformat(), 0.0),
        (moment(60).replace(tzinfo=None).isoformat(), 60.0),
        ("soon", None),
        (None, None),
        ("0001-01-01T00:00:00+23:59", 0.0),
        (["x"], None),
    ],
)
def test_aws_says_when(time: Any, deadline_s: float | None) -> None:
    there = servers.Aws(action={"action": "stop", "time": time})
    with answering(there) as running:
        leaving = clouds.Aws(running.client, Clock()).notice()
    assert leaving is not None
    assert leaving.deadline_s == deadline_s


def test_aws_recommends_before_it_interrupts() -> None:
    there = servers.Aws(rebalance={"noticeTime": "2026-03-01T11:59:00Z"})
    with answering(there) as running:
        one = clouds.Aws(running.client, Clock())
        first, again = one.notice(), one.notice()
        assert first == again
        assert first is not None
        assert not first.certain
        assert first.deadline_s is None
        there.action = interruption(120, "hibernate")
        certain = one.notice()
    assert certain is not None
    assert certain.certain
    assert running.paths().count(REBALANCE) == 1


def test_aws_takes_a_new_token_for_one_that_has_expired() -> None:
    there = servers.Aws()
    with answering(there) as running:
        one = clouds.Aws(running.client, Clock())
        one.notice()
        there.tokens.append("another")
        there.action = interruption(120)
        assert one.notice() is not None
    assert running.paths().count("/latest/api/token") == 2


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((401, {}, b""), id="refused"),
        pytest.param((403, {}, b"switched off"), id="switched off"),
        pytest.param((200, {}, b""), id="no token"),
        pytest.param((200, {}, b"a\r\nHost: elsewhere"), id="a header in the token"),
        pytest.param((200, {}, b"x" * 2000), id="a long token"),
        pytest.param((302, {"Location": "/latest"}, b""), id="redirect"),
    ],
)
def test_aws_gives_no_token(answer: servers.Told) -> None:
    with answering(lambda _: answer) as running, pytest.raises(MachineError):
        clouds.Aws(running.client, Clock()).notice()


@pytest.mark.parametrize("action", [[], {}, {"action": "dance"}, {"action": []}, "terminate", 7])
def test_aws_talks_nonsense(action: Any) -> None:
    with answering(servers.Aws(action=action)) as running, pytest.raises(MachineError):
        clouds.Aws(running.client, Clock()).notice()


# --- Google Cloud ---


def test_google_preempts() -> None:
    there = servers.Google()
    with answering(there) as running:
        one = clouds.Google(running.client, Clock())
        assert one.notice() is None
        there.preempted = "TRUE"
        notice = one.notice()
    assert notice == PreemptionNotice(reason="Google Cloud preempts this machine", deadline_s=30.0)


@pytest.mark.parametrize(
    ("said", "leaves"),
    [
        ("NONE", False),
        ("MIGRATE_ON_HOST_MAINTENANCE", False),
        ("TERMINATE_ON_HOST_MAINTENANCE", True),
        ("SOMETHING_NEW", False),
    ],
)
def test_google_maintains(said: str, leaves: bool) -> None:
    with answering(servers.Google(maintenance=said)) as running:
        leaving = clouds.Google(running.client, Clock()).notice()
    assert (leaving is not None) == leaves
    if leaving is not None:
        assert leaving.deadline_s == 60.0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((200, {}, b"TRUE"), id="not Google"),
        pytest.param((200, {"Metadata-Flavor": "Google"}, b"perhaps"), id="neither"),
        pytest.param((404, {"Metadata-Flavor": "Google"}, b""), id="nothing"),
        pytest.param((503, {"Metadata-Flavor": "Google"}, b"TRUE"), id="out of order"),
    ],
)
def test_google_talks_nonsense(answer: servers.Told) -> None:
    with answering(lambda _: answer) as running, pytest.raises(MachineError):
        clouds.Google(running.client, Clock()).notice()


# --- Azure ---


def event(kind: str, seconds: float | None, *resources: str) -> dict[str, Any]:
    begins = "" if seconds is None else format_datetime(moment(seconds), usegmt=True)
    return {
        "EventId": "f020ba2e",
        "EventStatus": "Scheduled" if begins else "Started",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources or ["WORKER_3"]),
        "NotBefore": begins,
    }


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_ends_a_machine(kind: str) -> None:
    with answering(servers.Azure([event(kind, 30)])) as running:
        leaving = clouds.Azure(running.client, Clock()).notice()
    reason = f"Azure has scheduled the end of this machine: {kind}"
    assert leaving == PreemptionNotice(reason=reason, deadline_s=30.0)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([], id="nothing"),
        pytest.param([event("Freeze", 900)], id="only a pause"),
        pytest.param([event("Preempt", 30, "worker_1", "worker_2")], id="others"),
        pytest.param([event("Dance", 30)], id="unknown"),
        pytest.param([{}], id="empty"),
        pytest.param([{"EventType": [], "Resources": {}}], id="other types"),
    ],
)
def test_azure_leaves_a_machine(events: Any) -> None:
    with answering(servers.Azure(events)) as running:
        assert clouds.Azure(running.client, Clock()).notice() is None


def test_azure_names_the_first_end_of_several() -> None:
    events = [event("Redeploy", 600), event("Preempt", 25), event("Reboot", 900)]
    with answering(servers.Azure(events)) as running:
        one = clouds.Azure(running.client, Clock())
        leaving, _ = one.notice(), one.notice()
    assert leaving is not None
    assert leaving.deadline_s == 25.0
    assert sum("compute/name" in path for path in running.paths()) == 1


def test_azure_has_begun() -> None:
    with answering(servers.Azure([event("Preempt", None)])) as running:
        leaving = clouds.Azure(running.client, Clock()).notice()
    assert leaving is not None
    assert leaving.deadline_s == 0.0


@pytest.mark.parametrize("events", [None, {}, "Preempt", [[]], ["Preempt"]])
def test_azure_talks_nonsense(events: Any) -> None:
    with answering(servers.Azure(events)) as running, pytest.raises(MachineError):
        clouds.Azure(running.client, Clock()).notice()


# --- which of them ---


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({}, None),
        ({"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "google"),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),  # a notebook
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC"}, None),
        ({"sys_vendor": "\x00\xff"}, None),
    ],
)
def test_the_firmware_names_the_cloud(
    tmp_path: Path, files: dict[str, str], name: str | None
) -> None:
    for file, text in files.items():
        (tmp_path / file).write_text(f"{text}\n")
    assert name_of(tmp_path) == name
    here = cloud_here(SystemClock(), dmi=tmp_path)
    assert (None if here is None else here.name) == name


def test_a_machine_in_no_cloud_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("socket.socket.connect", connect)
    assert cloud_here(SystemClock(), dmi=tmp_path) is None
    assert cloud_here(SystemClock(), "aws", dmi=tmp_path) is not None  # nor is one that is named


def test_it_can_be_said_or_turned_off(tmp_path: Path) -> None:
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert cloud_here(SystemClock(), "none", dmi=tmp_path) is None
    for name in CLOUDS:
        here = cloud_here(SystemClock(), name, dmi=tmp_path)
        assert here is not None
        assert here.name == name
    with pytest.raises(SpecError, match="RAYCLOUD_CLOUD"):
        cloud_here(SystemClock(), "amazon", dmi=tmp_path)


def test_the_address_is_the_link_local_one() -> None:
    asked: Callable[..., Any] = clouds.MetadataServer
    server = asked(SystemClock())
    assert (server._host, server._port) == ("169.254.169.254", 80)
