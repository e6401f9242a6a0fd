"""Writes this member's part of a checkpoint while training goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import Store, StoreError, encode, split_names
from raycloud.checkpoint.payload import write_part
from raycloud.errors import RaycloudError, public_name
from raycloud.events import MemberFailed, PartFailed, PartWritten
from raycloud.threads import THREADS

if TYPE_CHECKING:
    import threading

    import torch

    from raycloud.clock import Clock
    from raycloud.events import WorkerKey
    from raycloud.threads import Threads

AT_THE_END_S = 300.0  # the last part is written again for so long; a member may be silent for 600 s
_AGAIN_S, _LONGEST_S = 1.0, 30.0
_LOOK_UP_S = 0.2


# Writes a part in a store, and what is told once it is written, but for its record.
_Part = tuple[Callable[[], dict[str, Any]], PartWritten]


class Saver:
    """One checkpoint at a time: copies at the step's end, writes in the background.

    A part that cannot be written is told, and training goes on: another checkpoint follows. After
    the last step none does, so `finish` writes it again. `store`'s calls end, one way or the other;
    `report` is called from the writing thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        member: int,
        clock: Clock,
        report: Callable[[PartWritten | PartFailed | MemberFailed], None],
        threads: Threads = THREADS,
    ) -> None:
        self._store, self._member, self._clock = store, member, clock
        self._report, self._threads = report, threads
        self._thread: threading.Thread | None = None
        self._unwritten: _Part | None = None  # the newest that the store did not take

    def save(  # noqa: PLR0913 - what identifies a part, and what is in it
        self,
        *,
        step: int,
        rank: int,
        parts: int,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        own: Mapping[str, torch.Tensor] | None = None,
        generation: int = 0,
        key: WorkerKey | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Copy this member's share of `tensors`, then write it in the background.

        Blocks for the copy, and for a checkpoint before this one that is still being written. Every
        member of the `generation` that writes one of the `parts` passes the same names of tensors;
        `own` are copies that no other member has. `values`, what is no tensor, are for the
        manifest. Without a `key` this member is a replica of its own, of that `rank`. `first` is
        waited for before the part is told.
        """
        began_s = self._clock.monotonic_s()
        self.wait()
        self._unwritten = None
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        plain = encode(dict(values))
        mine = {n: tensors[n].to("cpu", copy=True) for n in split_names(sizes, parts)[rank]}
        mine |= own or {}
        store = self._store

        def write() -> dict[str, Any]:
            if first is not None:
                first()
            return write_part(store, step=step, rank=rank, parts=parts, tensors=mine)

        told = PartWritten(
            member=self._member,
            step=step,
            generation=generation,
            part={"rank": rank, "values": plain},
            blocked_s=self._clock.monotonic_s() - began_s,
            write_s=0.0,
            replica=rank if key is None else key[0],
            position=0 if key is None else key[1],
        )
        self._begin((write, told))

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written, or for so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None

    def finish(self, abandoned: Callable[[], bool]) -> None:
        """Until the newest part is written, or `abandoned`; what is refused is tried again."""
        self.wait()
        until_s, pause_s = self._clock.monotonic_s() + AT_THE_END_S, _AGAIN_S
        turn = self._threads.condition()
        while (part := self._unwritten) is not None:
            again_s = self._clock.monotonic_s() + pause_s
            while not abandoned() and self._clock.monotonic_s() < again_s:
                with turn:
                    turn.wait_for(abandoned, _LOOK_UP_S)
            if abandoned() or self._clock.monotonic_s() >= until_s:
                return
            self._begin(part)
            self.wait()
            pause_s = min(2.0 * pause_s, _LONGEST_S)

    def _begin(self, part: _Part) -> None:
        self._thread = self._threads.thread(self._write, part, name=f"save-{part[1].step}")
        self._thread.start()

    def _write(self, part: _Part) -> None:
        began_s, (write, told) = self._clock.monotonic_s(), part
        found: PartWritten | PartFailed | MemberFailed
        try:
            whole = {**told.part, "record": write()}
            write_s = self._clock.monotonic_s() - began_s
            found = replace(told, part=whole, write_s=write_s)
            self._unwritten = None
        except StoreError as error:
            self._unwritten = part
            found = PartFailed(
                member=told.member,
                step=told.step,
                generation=told.generation,
                why=error.message,
                hint=error.hint,
            )
        except RaycloudError as error:
            name, hint = public_name(error), error.hint
            found = MemberFailed(member=told.member, error=name, message=error.message, hint=hint)
        except Exception:  # noqa: BLE001 - the last line before the thread's end
            text = traceback.format_exc()
            found = MemberFailed(member=told.member, error="InternalError", message=text)
        self._report(found)
