"""What is asked of NCCL, by a stand-in of torch's group: there is no GPU here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from raycloud.errors import PlacementError, TransportError
from raycloud.net import nccl
from raycloud.net.nccl import NcclTransport

CPU = torch.device("cpu")


class Work:
    def __init__(self, after: int, error: Exception | None) -> None:
        self.after, self.error = after, error

    def is_completed(self) -> bool:
        self.after -= 1
        return self.after < 0

    def wait(self) -> None:
        assert self.after < 0
        if self.error is not None:
            raise self.error


class Group:
    """torch's group as far as it is used: `after` so many looks an exchange is complete.

    It is so once the group is aborted, too; while `stuck`, beginning one comes to no end.
    """

    after, error = 3, None
    stuck: threading.Event | None = None
    made: list[Group] = []  # noqa: RUF012 - a test's own

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.exchanged: list[torch.Tensor] = []
        self.works: list[Work] = []
        self.aborted = False
        self.settings = {name: os.environ.get(name) for name in nccl._SETTINGS}
        Group.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.exchanged += tensors
        self.limit_s = options.timeout.total_seconds()
        if self.stuck is not None:
            self.stuck.wait()
        self.works.append(Work(self.after, self.error))
        return self.works[-1]

    def abort(self) -> None:
        self.aborted = True
        for work in self.works:
            work.after = 0


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    for name in nccl._SETTINGS:  # put back as they were, also what is set meanwhile
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(Group, "made", [])
    return Group


def joined() -> NcclTransport:
    return NcclTransport(dist.HashStore(), rank=0, size=2, device=CPU)


def test_members_are_connected_before_anything_is_exchanged(group: type[Group]) -> None:
    joined()
    (made,) = group.made
    assert [tensor.tolist() for tensor in made.exchanged] == [[0.0]]
    assert made.settings == nccl._SETTINGS  # before the group is made, which reads them then
    assert not made.aborted


def test_what_somebody_has_set_stays(group: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    joined()
    assert group.made[0].settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.mark.parametrize(
    ("after", "error", "said"),
    [
        (10**9, None, "not connected the members in 0.01 s"),
        (0, dist.DistBackendError("gone"), "gone"),
    ],
)
def test_one_that_does_not_connect_is_given_up(
    after: int,
    error: Exception | None,
    said: str,
    group: type[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_CONNECTING_S", 0.01)
    monkeypatch.setattr(Group, "after", after)
    monkeypatch.setattr(Group, "error", error)
    with pytest.raises(TransportError, match=said):
        joined()
    assert group.made[0].aborted


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
        (RuntimeError("NCCL communicator was aborted"), TransportError),
    ],
)
def test_whose_fault_an_error_is(
    error: Exception,
    raised: type[Exception],
    group: type[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = joined()
    monkeypatch.setattr(Group, "error", error)
    with pytest.raises(raised) as found:
        one.all_reduce(torch.zeros(1)).wait(1.0)
    assert type(found.value) is raised


@pytest.mark.parametrize("call", ["allreduce", "broadcast"])
def test_what_torch_raises_of_others_is_the_end_of_an_exchange(
    call: str, group: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = joined()

    def gone(*_: Any) -> None:
        raise dist.DistBackendError("remote process exited")

    monkeypatch.setattr(Group, call, gone, raising=False)
    with pytest.raises(TransportError, match="remote process exited"):
        one.all_reduce(torch.zeros(1)) if call == "allreduce" else one.broadcast(torch.zeros(1), 0)


def test_an_exchange_has_no_time_limit_of_its_own(group: type[Group]) -> None:
    joined()
    assert group.made[0].limit_s >= 24 * 3600


@pytest.fixture
def stuck(group: type[Group], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Beginning an exchange waits for members that do not come, until this is set."""
    come = threading.Event()
    monkeypatch.setattr(nccl, "_BEGINNING_S", 0.01)
    monkeypatch.setattr(group, "stuck", come)
    yield come
    come.set()


def test_members_that_do_not_come_are_not_waited_for_without_end(
    group: type[Group], stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_CONNECTING_S", 0.05)
    with pytest.raises(TransportError, match="not connected the members"):
        joined()
    assert group.made[0].aborted
    assert not stuck.is_set()


def test_who_hangs_up_frees_the_gpu_and_takes_nothing_of_what_was_under_way(
    group: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = joined()
    monkeypatch.setattr(group, "after", 10**9)
    work = one.all_reduce(torch.zeros(1))
    assert not work.wait(0.001)
    one.hang_up()
    one._abort.join()  # type: ignore[union-attr]
    with pytest.raises(TransportError, match="hung up"):
        work.wait(1.0)  # an abort completes it
    with pytest.raises(TransportError, match="hung up"):
        one.all_reduce(torch.zeros(1))
    with pytest.raises(TransportError, match="hung up"):
        one.broadcast(torch.zeros(1), 0)
    one.hang_up()  # once more does no harm
    one.close()
    assert group.made[0].aborted


def test_an_abort_waits_for_what_is_being_begun_but_not_for_ever(
    group: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_BEGINNING_S", 0.05)
    one = joined()
    with one._beginning:
        one.close()
    assert group.made[0].aborted


def test_two_members_on_one_gpu_are_refused(
    group: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "invalid usage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on 60"

    def refused(*_: Any) -> None:
        raise dist.DistBackendError(told)

    monkeypatch.setattr(group, "allreduce", refused)
    with pytest.raises(PlacementError, match="the same GPU: Duplicate GPU detected") as found:
        joined()
    assert "NOSET_CUDA_VISIBLE_DEVICES" in found.value.hint
    assert group.made[0].aborted
