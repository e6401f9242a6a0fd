"""What is asked of NCCL, by a stand-in of torch's group: there is no GPU here."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import distributed as dist

from raycloud.errors import TransportError
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
    """torch's group as far as it is used: `after` so many looks an exchange is complete."""

    after, error = 3, None
    made: list[Group] = []  # noqa: RUF012 - a test's own

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.exchanged: list[torch.Tensor] = []
        self.aborted = False
        self.settings = {name: os.environ.get(name) for name in nccl._SETTINGS}
        Group.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.exchanged += tensors
        return Work(self.after, self.error)

    def abort(self) -> None:
        self.aborted = True


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
