"""Writes this member's part of a checkpoint while training goes on."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import Store, encode, split_names
from raycloud.checkpoint.payload import write_part
from raycloud.errors import RaycloudError, public_name
from raycloud.events import MemberFailed, PartWritten

if TYPE_CHECKING:
    import torch

    from raycloud.clock import Clock


class Saver:
    """One checkpoint at a time: copies at the step's end, writes in the background.

    Args:
        store: Where checkpoints go.
        member: This member's number.
        clock: For the seconds reported.
        report: Gets `PartWritten`, or `MemberFailed`, from the writing thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        member: int,
        clock: Clock,
        report: Callable[[PartWritten | MemberFailed], None],
    ) -> None:
        """Nothing is written yet."""
        self._store = store
        self._member = member
        self._clock = clock
        self._report = report
        self._thread: threading.Thread | None = None

    def save(
        self,
        *,
        step: int,
        rank: int,
        parts: int,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        generation: int = 0,
    ) -> None:
        """Copy this member's share of `tensors`, then write it in the background.

        Blocks for the copy, and for a checkpoint before this one that is still being written.

        Args:
            step: Steps committed in this state.
            rank: Which of the parts is this member's.
            parts: Number of members that write.
            tensors: All live tensors of the state; every member passes the same names.
            values: What is no tensor; goes into the manifest.
            generation: Whose members divide it.
        """
        began_s = self._clock.monotonic_s()
        self.wait()
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        mine = split_names(sizes, parts)[rank]
        plain = encode(dict(values))
        copies = {name: tensors[name].to("cpu", copy=True) for name in mine}
        blocked_s = self._clock.monotonic_s() - began_s

        def write() -> None:
            write_began_s = self._clock.monotonic_s()
            try:
                record = write_part(self._store, step=step, rank=rank, parts=parts, tensors=copies)
            except RaycloudError as error:
                self._report(
                    MemberFailed(
                        member=self._member,
                        error=public_name(error),
                        message=error.message,
                        hint=error.hint,
                    )
                )
                return
            except Exception:  # noqa: BLE001 - the last line before the thread's end
                self._report(
                    MemberFailed(
                        member=self._member, error="InternalError", message=traceback.format_exc()
                    )
                )
                return
            self._report(
                PartWritten(
                    member=self._member,
                    step=step,
                    part={"rank": rank, "record": record, "values": plain},
                    blocked_s=blocked_s,
                    write_s=self._clock.monotonic_s() - write_began_s,
                    generation=generation,
                )
            )

        self._thread = threading.Thread(target=write, name=f"save-{step}")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written, or for so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
