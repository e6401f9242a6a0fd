"""Writes this member's part of a checkpoint while training goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What is to be written, set aside from the state that goes on changing."""

    step: int
    rank: int
    parts: int
    generation: int
    tensors: Mapping[str, torch.Tensor]
    values: Any
    blocked_s: float
    key: WorkerKey


class Saver:
    """One checkpoint at a time: copies at the step's end, writes in the background.

    A part that cannot be written is told, and training goes on: another checkpoint follows. After
    the last step none does, so `finish` writes it again.

    Args:
        store: Where checkpoints go; its calls end, one way or the other.
        member: This member's number.
        clock: For the seconds reported.
        report: Gets `PartWritten`, `PartFailed`, or `MemberFailed`, from the writing thread.
        threads: Where that one comes from.
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
        generation: int = 0,
        key: WorkerKey | None = None,
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
            key: This member's replica and position; None: a replica of its own, of that rank.
        """
        began_s = self._clock.monotonic_s()
        self.wait()
        self._unwritten = None
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        plain = encode(dict(values))
        mine = {n: tensors[n].to("cpu", copy=True) for n in split_names(sizes, parts)[rank]}
        part = _Part(
            step=step,
            rank=rank,
            parts=parts,
            generation=generation,
            tensors=mine,
            values=plain,
            blocked_s=self._clock.monotonic_s() - began_s,
            key=(rank, 0) if key is None else key,
        )
        self._begin(part)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written, or for so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None

    def finish(self, abandoned: Callable[[], bool]) -> None:
        """Until the newest part is written; one that the store does not take is tried for a while.

        Args:
            abandoned: Says that nobody waits for it any more.
        """
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
        self._thread = self._threads.thread(self._write, part, name=f"save-{part.step}")
        self._thread.start()

    def _write(self, part: _Part) -> None:
        began_s = self._clock.monotonic_s()
        told: PartWritten | PartFailed | MemberFailed
        whose: dict[str, Any] = {"member": self._member, "step": part.step}
        whose["generation"] = part.generation
        try:
            record = write_part(
                self._store,
                step=part.step,
                rank=part.rank,
                parts=part.parts,
                tensors=part.tensors,
            )
            told = PartWritten(
                part={"rank": part.rank, "record": record, "values": part.values},
                blocked_s=part.blocked_s,
                write_s=self._clock.monotonic_s() - began_s,
                **whose,
                replica=part.key[0],
                position=part.key[1],
            )
            self._unwritten = None
        except StoreError as error:
            self._unwritten = part
            told = PartFailed(why=error.message, hint=error.hint, **whose)
        except RaycloudError as error:
            name, hint = public_name(error), error.hint
            told = MemberFailed(member=self._member, error=name, message=error.message, hint=hint)
        except Exception:  # noqa: BLE001 - the last line before the thread's end
            text = traceback.format_exc()
            told = MemberFailed(member=self._member, error="InternalError", message=text)
        self._report(told)
