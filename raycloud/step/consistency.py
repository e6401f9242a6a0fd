"""Replica consistency: a digest of the state, compared over the members that hold a copy of it.

Replicas are to be equal after each commit. Each second, and at each checkpoint, every member gives
a digest of its own with the next message on the control lane: nobody waits for it. Where digests
differ, all see it in the same message; after that step they compare tensor by tensor, and end with
an error that names the tensor and the members. Where processors are of unlike kinds, replicas
differ by rounding: there all take the lowest rank's, if rounding can make the difference (`bound`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from raycloud.errors import TaskError
from raycloud.net.lane import DIGEST_WORDS, LaneDigest, LaneReport
from raycloud.step.mutation import fingerprints
from raycloud.step.state import layout

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.lane import Lane
    from raycloud.step.replica import Replica

_EVERY_S = 1.0  # as often as steps are reported
_TIMES = 200.0  # a digest takes at most one part in so many of the time
_ALIGN_EVERY_S = 60.0
_ALIGN_TIMES = 100.0  # the same for taking another's replica
_LINK_BYTES_PER_S = 125e6  # before the first time has shown what it takes
_NAMED = 3
INNER = ("optimizer/", "held/optimizer/")  # of which members of a round have their own
_SKETCHES, _ROW = 16, 4096
_TOLD = 4  # of each tensor that is taken
_LAMBDA = 4.0


class Consistency:
    """Compares this member's replica with the others'.

    Order of calls: `enter` a generation; each step `told` with what is sent on the lane and `heard`
    with what is read; after the commit `settle`, at the same place on every member. `look` makes a
    digest that the next `told` gives.
    """

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica, self._clock = replica, clock
        self._members: tuple[int, ...] = ()
        self._rank, self._unlike = 0, False
        self._due_s = self._align_due_s = 0.0
        self._digest: tuple[int, LaneDigest] | None = None  # before which step
        self._asked = self._differ = False
        self._given_step = self._equal_step = -1
        self._aligned_step = 0
        self._bases: dict[str, torch.Tensor] = {}

    def enter(self, members: tuple[int, ...], rank: int, step: int, *, unlike: bool) -> None:
        """A generation of `members`, by rank, begins before `step`; what was sent is forgotten.

        They are `unlike` where not all of their processors are of one kind.
        """
        self._members, self._rank, self._unlike = members, rank, unlike
        self._digest, self._asked, self._differ = None, False, False
        now_s = self._clock.monotonic_s()
        self._due_s = max(self._due_s, now_s + _EVERY_S)
        if not unlike or self._bases:
            return
        self._align_due_s = now_s + _ALIGN_EVERY_S
        if self._replica.following is not None:  # how far it moves, the others know
            self._aligned_step = step
            return
        self._rebase(step)
        whole = sum(t.numel() * t.element_size() for t in self._tensors().values())
        self._align_due_s = now_s + max(_ALIGN_EVERY_S, _ALIGN_TIMES * whole / _LINK_BYTES_PER_S)

    def due(self) -> bool:
        """Whether it is time to see that replicas are equal."""
        return self._clock.monotonic_s() >= self._due_s

    def told(self, step: int) -> LaneDigest:
        """What goes with the lane's message of `step`."""
        self._given_step = -1
        if self._digest is not None and self._digest[0] == step:
            self._given_step = step
            return self._digest[1]
        follows = self._replica.following is not None
        return LaneDigest(holds_off=0.0 if follows or self.due() else 1.0)

    def heard(self, sums: LaneReport) -> None:
        """What a message has brought of all."""
        digest = sums.digest
        self._asked = len(self._members) > 1 and digest.holds_off == 0.0
        if digest.given > 1 and not digest.same:
            self._differ = True
        elif digest.given > 1:
            self._equal_step = max(self._equal_step, self._given_step)

    def look(self, step: int) -> None:
        """Make the digest of the state before `step`; without effect where there is one."""
        alone = len(self._members) <= 1
        made = self._digest is not None and self._digest[0] == step
        if alone or made or self._replica.following is not None:
            return
        began_s = self._clock.monotonic_s()
        whole = 0
        for one in fingerprints(list(self._tensors().values())):
            whole = (whole * 6364136223846793005 + one) & (2**64 - 1)
        whole ^= whole >> 32
        words = [float(whole >> 16 * k & 0xFFFF) for k in range(DIGEST_WORDS)]
        now_s = self._clock.monotonic_s()
        self._due_s = now_s + max(_EVERY_S, _TIMES * (now_s - began_s))
        self._digest = step, LaneDigest.of(words, holds_off=float(not self.due()))

    def settle(self, step: int, lane: Lane, *, last: bool = False) -> None:
        """After a commit, before `step`: find out what differs if anything does, or look.

        Nothing that was sent on the `lane` is unread; nothing comes after the `last`. `TaskError`:
        replicas have drifted apart; `TransportError`: the exchange broke, or was abandoned.
        """
        differ, asked, self._differ, self._asked = self._differ, self._asked, False, False
        if differ:
            self._find_out(step, lane, last=last)
        elif asked:
            self.look(step)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What is exact: parameters, what the optimizer holds but in rounds, running averages."""
        state, exact = self._replica.state, self._replica.statistics.exact
        tensors = state.tensors()
        rounds = self._replica.rounds
        if rounds is not None and rounds.unlike:
            tensors = {name: t for name, t in tensors.items() if not name.startswith(INNER)}
        return {
            name: tensor
            for name, tensor in sorted(tensors.items())
            if not state.is_buffer(name) or name.removeprefix("model/") in exact
        }

    def _rebase(self, step: int) -> None:
        self._bases = {name: sketch(tensor) for name, tensor in self._tensors().items()}
        self._aligned_step = step

    def _find_out(self, step: int, lane: Lane, *, last: bool) -> None:
        """Raise what is wrong, or take the lowest rank's replica; all members call this."""
        follows = self._replica.following is not None
        tensors = {} if follows else self._tensors()
        ready = last or self._clock.monotonic_s() >= self._align_due_s
        steps = step - self._aligned_step
        heads = lane.gather(
            [float(not follows), len(tensors), layout(tensors), float(ready), steps]
        )
        holders = [rank for rank, one in enumerate(heads) if one[0]]
        if len({heads[r][2] for r in holders}) > 1:
            groups = self._groups({r: heads[r][2] for r in holders})
            raise self._drifted(step, f"the replicas hold other tensors on {groups}")
        count = int(heads[holders[0]][1])
        rows = lane.gather(fingerprints(list(tensors.values())) or [0.0] * count)
        names = list(tensors) or [""] * count
        differing = [k for k in range(count) if len({rows[r][k] for r in holders}) > 1]
        if not differing:
            what = f"replicas differed before step {step - 1}, and do no more"
            self._replica.notice(what, {})
        elif not self._unlike:
            groups = self._groups({r: rows[r][differing[0]] for r in holders})
            few = ", ".join(repr(names[k]) for k in differing[:_NAMED])
            more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            differ = "differ" if len(differing) > 1 else "differs"
            raise self._drifted(step, f"{few}{more} {differ} on {groups}")
        elif len(holders) == len(heads) and all(one[3] for one in heads):
            self._align(step, lane, [names[k] for k in differing], max(int(o[4]) for o in heads))

    def _align(self, step: int, lane: Lane, names: Sequence[str], steps: int) -> None:
        """Rank 0's replica becomes that of all, unless one is farther from it than by rounding."""
        began_s, tensors = self._clock.monotonic_s(), self._tensors()
        self._replica.settle()
        rows = lane.gather([n for name in names for n in self._take(name, tensors[name], lane)])
        largest: tuple[float, str] = (0.0, "")
        for k, name in enumerate(names):
            each = [row[_TOLD * k : _TOLD * (k + 1)] for row in rows]
            moved, dtype = max(one[2] for one in each), tensors[name].dtype
            inexact = dtype.is_floating_point or dtype.is_complex
            eps = torch.finfo(dtype).eps if inexact else 0.0
            most = bound(eps, steps, norm=each[0][3], moved=moved)
            if far := [rank for rank, one in enumerate(each) if not one[0] <= most]:
                who = _members([self._members[rank] for rank in far])
                by = max(each[rank][0] for rank in far)
                what = f"{name!r} differs on {who} from member {self._members[0]}"
                raise self._drifted(step, f"{what} by {by:.3g}, rounding makes {most:.3g} at most")
            largest = max(largest, (max(one[1] for one in each), name))
        self._replica.statistics.settle()
        self._rebase(step)
        now_s = self._clock.monotonic_s()
        wait_s = max(_ALIGN_EVERY_S, _ALIGN_TIMES * (now_s - began_s))
        self._align_due_s = now_s + wait_s
        if self._rank == 0:
            self._replica.notice(
                "replicas were aligned: members' processors are unlike, and round differently",
                {
                    "step": step,
                    "since_step": step - steps,
                    "largest_difference": largest[0],
                    "tensor": largest[1],
                    "tensors": len(names),
                    "seconds": round(now_s - began_s, 3),
                    "next_s": round(wait_s, 1),
                },
            )

    def _take(self, name: str, tensor: torch.Tensor, lane: Lane) -> tuple[float, ...]:
        """Take rank 0's; how far apart they were (norm, largest), how far it moved, its norm."""
        base = self._bases.get(name)
        moved = 0.0 if base is None else _norm(sketch(tensor) - base) / math.sqrt(_SKETCHES)
        here = tensor.to("cpu", copy=True).contiguous()
        taken = here.clone()
        lane.broadcast(taken.view(-1))
        tensor.copy_(taken)
        mine, other = (_real(one).double() for one in (here, taken))
        apart = torch.where(mine == other, 0.0, (mine - other).abs())
        largest = float(apart.max()) if apart.numel() else 0.0
        return _norm(apart), largest, moved, _norm(other.nan_to_num(0.0, 0.0, 0.0))

    def _groups(self, values: Mapping[int, float]) -> str:
        """Who differs from whom: the fewer from the more."""
        of: dict[float, list[int]] = {}
        for rank, value in values.items():
            of.setdefault(value, []).append(self._members[rank])
        most = max(of.values(), key=len)
        others = sorted(m for group in of.values() if group is not most for m in group)
        return f"{_members(others)} from {_members(most)}"

    def _drifted(self, step: int, what: str) -> TaskError:
        equal = self._equal_step
        known = f"; they were equal before step {equal}" if equal >= 0 else ""
        return TaskError(
            f"replicas have drifted apart: before step {step}, {what}{known}",
            hint="whatever changes parameters must do the same on every worker: look for random "
            "numbers, clocks, files and ranks in modules, schedules and optimizer hooks; if there "
            "are none, a worker's memory may be at fault. Go on from an earlier checkpoint",
        )


def bound(eps: float, steps: int, *, norm: float, moved: float) -> float:
    """How far two replicas of a tensor may be apart by rounding alone, as an L2 norm.

    All members get the same bits from an exchange, so replicas do not amplify each other's
    differences: each update is the same function of the same gradient, and only the rounding of its
    arithmetic differs. With u the unit roundoff of the tensor's type (here the distance `eps` from
    1 to the next number), n steps since both were equal, x the tensor and d how far it moved since:

    - Storing x rounds by at most u |x| in each step. Such errors are independent of each other, so
      that they add up to u sqrt(n) |x| (N. Higham, T. Mary, "A new approach to probabilistic
      rounding error analysis", SIAM J. Sci. Comput. 41, 2019: the constant u n becomes u sqrt(n)).
    - What an update adds has relative errors of a few u where the optimizer is smooth in the
      gradient. Where it is not (the sign of a moment, as of Lion), an element whose moment is
      within rounding of zero may go the other way. That befalls one in 1/u of them: as a norm
      sqrt(u) of the movement. So sqrt(u) |d| holds for both; the smooth ones stay far below.

    The bound is 4 (u sqrt(n) |x| + sqrt(u) |d|). In float32 replicas that were trained apart
    differ by about |d|, seven hundred times as much. Integers are to be equal.

    >>> bound(2.0**-24, 100, norm=10.0, moved=1.0) < 0.002
    True
    """
    return _LAMBDA * (eps * math.sqrt(max(steps, 1)) * norm + math.sqrt(eps) * moved)


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Sixteen sums of a tensor's elements by random signs: those of a difference tell its length.

    The mean of their squares estimates the squared norm, with a relative error of a third (W.
    Johnson, J. Lindenstrauss 1984; D. Achlioptas 2003: signs will do).
    """
    flat = tensor.detach()
    if flat.dtype != torch.float64:
        flat = _real(flat).to(torch.float32)
    flat = flat.nan_to_num(0.0, 0.0, 0.0).reshape(-1)
    signs = _signs(tensor.device).to(flat.dtype)
    rows = flat.numel() // _ROW
    left = flat[rows * _ROW :]
    found = (left @ signs[: left.numel()]).double()
    if rows:
        sums = (flat[: rows * _ROW].view(rows, _ROW) @ signs).double()
        places = torch.arange(1, rows + 1, device=tensor.device) % (_ROW - 3)
        found = found + (sums * signs[places].flip(1).double()).sum(0)
    return found.cpu()


@cache
def _signs(device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return (2.0 * torch.randint(0, 2, (_ROW, _SKETCHES), generator=draw) - 1.0).to(device)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _members(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"member {listed}" if len(numbers) == 1 else f"members {listed}"
