"""What members say, on its way to the driver: delayed, in order per member, sometimes lost.

As Ray's calls to actors do it: a member's words come in the order in which it said them, and once,
since a call that failed is not made again; how the members' words interleave is left to chance. Of
a member that has died, what was on its way may still come, and what comes later than that is lost.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from raycloud.events import Event, MemberReady, StepsCommitted

if TYPE_CHECKING:
    from raycloud.order import Position
    from raycloud.simulate.world import World


_DRAWN = 256  # delays at once
_NEVER = float("inf")
_FEW = 8  # words that find their places among the others one by one


@dataclass(slots=True, eq=False)
class Body:
    """One simulated member.

    Attributes:
        number: Its number.
        place: Where it is; None: it waits for a place.
        joins: It is to join others that compute.
        alive: Its process lives.
        built: It has model and data.
        warned: It is going to be gone, and has said so or the driver knows.
        away: The driver has left it out, and does not listen to it.
        frozen: By how many faults it is kept from computing, and from speaking.
        unheard: By how many faults it is kept from the driver only.
        withheld: What it says meanwhile, with the seconds after which it would have come.
        begun: It has the state of the training.
        step: The step that it is to commit next.
        value: Its parameters before that step.
        told: One past the last step that it has told of.
        generation: As which it computed last.
        owes: Micro-batches that it has computed and not told of.
        kept: The micro-batches of its step that it has computed and kept.
        outbox_s: Its last word arrives then.
        heard_until_s: Dead, and later words of it are lost.
        well_since_s: Since when nothing has befallen it, or its node.
    """

    number: int
    place: int | None = None
    joins: bool = False
    alive: bool = True
    built: bool = False
    warned: bool = False
    away: bool = False
    frozen: int = 0
    unheard: int = 0
    withheld: list[tuple[Event, float]] = field(default_factory=list)
    begun: bool = False
    step: int = 0
    value: int = 0
    told: int = 0
    generation: int = 0
    owes: int = 0
    kept: tuple[int, ...] | range = ()
    outbox_s: float = 0.0
    heard_until_s: float = float("inf")
    well_since_s: float = 0.0

    @property
    def well(self) -> bool:
        """It can compute, be heard and be called."""
        return self.alive and not self.frozen and not self.unheard


# Millions of these are made. A frozen record sets each field by `object.__setattr__`, which takes
# most of the time; this one has the same fields, is not frozen, and then becomes one that is.
_Draft: Any = make_dataclass(
    "_Draft", [(f.name, f.type, f) for f in fields(StepsCommitted)], kw_only=True, slots=True
)

# Minus when it arrives, and minus its place in the order; whose. The next one sorts last.
_Word = tuple[float, int, Body | None, Event]


class Words:
    """Words on their way.

    Args:
        world: Whose time and chance.
        delay_s: A word is at most this long on its way.

    Attributes:
        deaf_until_s: The driver takes nothing in before.
    """

    def __init__(self, world: World, delay_s: float) -> None:
        """Nothing was said yet."""
        self._world = world
        self._delay_s = delay_s
        self._new: list[_Word] = []
        self._due: list[_Word] = []  # sorted
        self._count = 0
        self._drawn_s: list[float] = []  # delays
        self.deaf_until_s = 0.0

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._due) + len(self._new)

    @property
    def next_s(self) -> float:
        """When the next one is taken in."""
        if self._new:
            self._sort()
        if not self._due:
            return _NEVER
        arrives_s = -self._due[-1][0]
        return arrives_s if arrives_s > self.deaf_until_s else self.deaf_until_s

    def say(self, body: Body, event: Event, after_s: float = 0.0) -> None:
        """A member says something, once `after_s` have passed."""
        if not body.alive or body.away:
            return
        if body.frozen or body.unheard:
            body.withheld.append((event, after_s))
            return
        if not self._drawn_s:
            self._drawn_s = (self._world.chance.random(_DRAWN) * self._delay_s).tolist()
        arrives_s = self._world.now_s + after_s + self._drawn_s.pop()
        body.outbox_s = max(body.outbox_s, arrives_s)
        self._push(body.outbox_s, body, event)

    def tell(self, event: Event, at_s: float) -> None:
        """The driver finds out by itself."""
        self._push(at_s, None, event)

    def take(self) -> Event | None:
        """The next one; None: it is lost."""
        if self._new:
            self._sort()
        minus_s, _, body, event = self._due.pop()
        return event if body is None or -minus_s <= body.heard_until_s else None

    def hurry(self) -> None:
        """All that is on its way arrives now, in order."""
        now_s = self._world.now_s
        self._sort()
        self._due = [(max(s, -now_s), n, b, e) for n, (s, _, b, e) in enumerate(self._due)]

    def _push(self, arrives_s: float, body: Body | None, event: Event) -> None:
        self._count += 1
        self._new.append((-arrives_s, -self._count, body, event))

    def _sort(self) -> None:
        """Many words are said at once: they are sorted once, and not each among all others."""
        if len(self._new) <= _FEW:
            for word in self._new:
                insort(self._due, word)
        else:
            self._due += self._new
            self._due.sort()
        self._new.clear()


def ready(body: Body, *, samples: int, micro_batch_s: float, node: int) -> MemberReady:
    """A member's word that it can compute."""
    return MemberReady(
        member=body.number,
        samples=samples,
        parameters=1,
        state_bytes=8,
        gradient_bytes=8,
        fixed_s=0.0,
        micro_batch_s=micro_batch_s,
        node=f"node-{node}",
    )


def committed(
    body: Body, last_step: int, at: Position, computed: int, micro_batch_s: float
) -> StepsCommitted:
    """A member's word that it committed all steps from what it told last to before `last_step`.

    Args:
        body: Whose.
        last_step: One past the last step.
        at: Where the sequence stands then.
        computed: Micro-batches of these steps, of all members.
        micro_batch_s: How long a micro-batch takes it.
    """
    compute_s = body.owes * micro_batch_s
    word: StepsCommitted = _Draft(
        member=body.number,
        generation=body.generation,
        first_step=body.told,
        last_step=last_step,
        epoch=at.epoch,
        offset=at.offset,
        loss=1.0,
        weight=1.0,
        samples=body.owes,
        micro_batches=body.owes,
        computed=computed,
        grad_norm=1.0,
        learning_rate=1.0,
        wall_s=compute_s,
        compute_s=compute_s,
        data_s=0.0,
        exchange_s=0.0,
        cpu_s=compute_s,
        bytes_sent=0,
        bytes_dense=0,
    )
    word.__class__ = StepsCommitted
    return word
