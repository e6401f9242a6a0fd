"""The scenarios S1 to S9: nodes, links, and what happens to them, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.course import EXCHANGE_LIMIT_S
from benchmarks.testbed import traces
from benchmarks.testbed.events import Event
from benchmarks.testbed.spec import NodeSpec, Spec, TrunkSpec
from benchmarks.workload import LEARNING_RATE

GLOBAL_BATCH = 64
PER_WORKER = 16
BY_JOURNAL = "the worker whose journal is the newest"  # of a `kill-process`: how it is found
QUICK_WINDOW_S = 6.0
_QUICK_CORES = 0.8  # imports alone take many seconds at less
_QUICK_LIMIT_S = 60.0
_SHORTEST_NOTICE_S = 0.5
_GIGABIT, _MEGABIT = 1e9, 1e6
_STAYING = frozenset({"kill-process", "freeze", "thaw", "cut", "mend", "throttle", "rate"})

NOTES = (
    "The head and the contestant's driver have a namespace of their own, without quota or limit.",
    "A node's quota covers all of its processes, its raylet too; a node of a contestant that is not"
    " on Ray has no raylet. The limit is measured with raylets.",
)
_GOING = (
    "With fewer nodes or workers the peers make smaller updates, of 16 samples for each that is"
    " left, while raycloud's stay at 64.",
)
_COMING = (
    "A node that is added joins Ray before its quota is set; contestants that are not on Ray start"
    " their processes under the quota. For both, the limit counts the node from the add on.",
)
_SITTING_OUT = (
    f"The peers wait {EXCHANGE_LIMIT_S:g} s for each other within an exchange, where they have such"
    " a limit, so by construction they sit out each of these faults, which last 20 s.",
)
_NOTICE = (
    "With notice, Ray is told to drain the node; the processes of contestants that are not on Ray"
    " get SIGTERM.",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One setting to race in.

    Attributes:
        name: S1 to S9.
        title: What it is, in a few words.
        spec: The testbed at the start.
        events: What happens, at seconds into the window.
        window_s: Seconds over which speed is measured.
        limit_s: Seconds from the start of a contestant after which its run is over.
        notes: What else a reader of the tables has to know.
        quick_events: Takes the place of `events` in `squeezed`, in its seconds; None: the same
            ones, squeezed.
    """

    name: str
    title: str
    spec: Spec
    events: tuple[Event, ...] = ()
    window_s: float = 60.0
    limit_s: float = 360.0
    notes: tuple[str, ...] = NOTES
    quick_events: tuple[Event, ...] | None = None

    @property
    def elastic(self) -> bool:
        """Whether nodes or processes come or go, rather than slow down."""
        return any(event.action not in {"throttle", "rate"} for event in self.events)

    @property
    def later(self) -> tuple[NodeSpec, ...]:
        """Nodes that are not there at the start."""
        there = {node.name for node in self.spec.nodes}
        found = {e.spec.name: e.spec for e in self.events if e.spec and e.spec.name not in there}
        return tuple(found.values())

    @property
    def everyone(self) -> Spec:
        """The testbed with all nodes that it ever has: where the limit is measured."""
        return dataclasses.replace(self.spec, nodes=(*self.spec.nodes, *self.later))

    def describe(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "title": self.title,
            "nodes": [plain_node(node) for node in self.spec.nodes],
            "later": [plain_node(node) for node in self.later],
            "trunks": [
                {**dataclasses.asdict(trunk), "zones": list(trunk.zones)}
                for trunk in self.spec.trunks
            ],
            "events": [{"at_s": e.at_s, "what": in_words(e)} for e in self.events],
            "window_s": self.window_s,
            "limit_s": self.limit_s,
            "notes": list(self.notes),
        }

    def squeezed(self) -> Scenario:
        """The same with two nodes, and one that joins, none of them slow: does it work?

        What happens to a node that is left out happens to one of the others instead, unless the
        node would come or go by it.
        """
        several = len({node.zone for node in self.spec.nodes}) > 1
        two = (self.spec.nodes[0], self.spec.nodes[-1 if several else 1])
        kept = {node.name: _quicker(node) for node in (*two, *self.later[:1])}
        factor = QUICK_WINDOW_S / self.window_s
        events = self.quick_events
        if events is None:
            events = tuple(e for old in self.events for e in _squeeze(old, kept, factor))
        first = tuple(kept[n.name] for n in self.spec.nodes if n.name in kept)
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(self.spec, nodes=first),
            events=events,
            window_s=QUICK_WINDOW_S,
            limit_s=_QUICK_LIMIT_S,
            quick_events=None,
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How all contestants are run.

    Attributes:
        learning_rate: Of AdamW.
        target_loss: Held-out loss at which a run is over; None: after the window.
        small: Whether the model is the tiny one.
        per_worker: Samples of a step of one node, for who splits equally.
        global_batch: Samples of a step of raycloud's.
        warm_up_updates: Updates before the window, from when every node has taken part in one. One
            that compresses (PowerSGD) does so from the tenth on.
        warm_up_rounds: In place of them, for who makes one update of a round of steps.
        warm_up_s: Seconds before the window, counted likewise.
        first_update_limit_s: From the start to the first update, and from there until every node
            has taken part.
        last_step_s: For the step that the window's end cuts, at least.
        last_round_s: The same at most: it may be a round, or a step that a fault holds up.
        limit_warm_up_s: The limit's, from when every node has computed an update.
        limit_window_s: Over which the limit is measured.
    """

    learning_rate: float
    target_loss: float | None = None
    small: bool = False
    per_worker: int = PER_WORKER
    global_batch: int = GLOBAL_BATCH
    warm_up_updates: int = 12
    warm_up_rounds: int = 2
    warm_up_s: float = 10.0
    first_update_limit_s: float = 180.0
    last_step_s: float = 15.0
    last_round_s: float = 120.0
    limit_warm_up_s: float = 15.0
    limit_window_s: float = 30.0

    @classmethod
    def quick(cls) -> Settings:
        """Does it work? The tiny model, small batches, hardly any warm-up, no target."""
        return cls(
            learning_rate=LEARNING_RATE,
            small=True,
            per_worker=4,
            global_batch=8,
            warm_up_updates=2,
            warm_up_s=0.5,
            first_update_limit_s=90.0,
            last_step_s=3.0,
            last_round_s=15.0,
            limit_warm_up_s=0.5,
            limit_window_s=2.0,
        )


def in_words(event: Event) -> str:
    """What an event does, such as "cut n3 (in)"."""
    more = {
        "cut": event.direction or "both",
        "throttle": "no quota" if event.cores is None else f"{event.cores:g} cores",
        "drain": f"{event.deadline_s or 0:g} s notice",
    }.get(event.action)
    return f"{event.action} {event.node}" + (f" ({more})" if more else "")


def plain_node(node: NodeSpec) -> dict[str, Any]:
    """A node as plain values."""
    return {**dataclasses.asdict(node), "labels": dict(node.labels)}


def _squeeze(event: Event, kept: Mapping[str, NodeSpec], factor: float) -> Sequence[Event]:
    """The event in a shorter time, for nodes that are kept."""
    node = event.node
    if node not in kept:
        if event.action not in _STAYING:
            return []
        node = list(kept)[(int(node[1:]) - 1) % len(kept)]
    changed: dict[str, Any] = {"node": node, "at_s": round(event.at_s * factor, 3)}
    if event.cores is not None:
        changed["cores"] = max(_QUICK_CORES, event.cores)
    if event.deadline_s is not None:
        changed["deadline_s"] = max(_SHORTEST_NOTICE_S, event.deadline_s * factor)
    if event.spec is not None:
        changed["spec"] = _quicker(event.spec)
    return [dataclasses.replace(event, **changed)]


def _quicker(node: NodeSpec) -> NodeSpec:
    cores = None if node.cores is None else max(_QUICK_CORES, node.cores)
    return dataclasses.replace(node, cores=cores)


def _node(number: int, cores: float, bits_per_s: float, **more: Any) -> NodeSpec:
    return NodeSpec(
        name=f"n{number}",
        cores=cores,
        egress_bits_per_s=bits_per_s,
        ingress_bits_per_s=bits_per_s,
        **more,
    )


def _nodes(cores: Sequence[float], bits_per_s: float, **more: Any) -> Spec:
    return Spec(nodes=tuple(_node(i, c, bits_per_s, **more) for i, c in enumerate(cores, 1)))


def _kill_process(at_s: float, node: str) -> Event:
    return Event(at_s=at_s, action="kill-process", node=node, matching=BY_JOURNAL)


def _kill_and_return(nodes: Sequence[str], kill_s: float, return_s: float) -> tuple[Event, ...]:
    kills = [Event(at_s=kill_s, action="kill-node", node=node) for node in nodes]
    return (*kills, *(Event(at_s=return_s, action="add", node=node) for node in nodes))


_EQUAL = _nodes((0.4, 0.4, 0.4, 0.4), _GIGABIT)
_UNEQUAL = (0.8, 0.4, 0.2, 0.2)
_SPOT = _nodes((0.4, 0.4, 0.4, 0.4), _GIGABIT, spot=True)
# Four hours of the window: through no node at all, and through two and three of them.
_HELD = dataclasses.replace(traces.SPOT, held=traces.SPOT.held[:48])
_S_PER_HOUR = 60.0
_JOINING = tuple(_node(i, 0.4, _GIGABIT) for i in (3, 4))

SCENARIOS: Mapping[str, Scenario] = {
    one.name: one
    for one in (
        Scenario(name="S1", title="equal nodes, a fast link", spec=_EQUAL),
        Scenario(
            name="S2",
            title="unequal nodes, a thin link",
            spec=_nodes(_UNEQUAL, 100 * _MEGABIT),
        ),
        Scenario(
            name="S3",
            title="unequal nodes, a very thin link",
            spec=_nodes(_UNEQUAL, 20 * _MEGABIT),
            limit_s=600.0,
        ),
        Scenario(
            name="S4",
            title="a node falls to a quarter of its speed, and recovers",
            spec=_EQUAL,
            events=(
                Event(at_s=20.0, action="throttle", node="n1", cores=0.1),
                Event(at_s=40.0, action="throttle", node="n1", cores=0.4),
            ),
        ),
        Scenario(
            name="S5",
            title="a worker is killed every 30 s",
            spec=_EQUAL,
            events=tuple(_kill_process(30.0 * i + 15.0, f"n{i + 1}") for i in range(4)),
            window_s=120.0,
            notes=(*NOTES, *_GOING),
        ),
        Scenario(
            name="S6",
            title="a node frozen, another's link cut, a third's in one direction",
            spec=_EQUAL,
            events=(
                Event(at_s=10.0, action="freeze", node="n2"),
                Event(at_s=30.0, action="thaw", node="n2"),
                Event(at_s=60.0, action="cut", node="n3"),
                Event(at_s=80.0, action="mend", node="n3"),
                Event(at_s=110.0, action="cut", node="n4", direction="in"),
                Event(at_s=130.0, action="mend", node="n4"),
            ),
            window_s=160.0,
            notes=(*NOTES, *_GOING, *_SITTING_OUT),
        ),
        Scenario(
            name="S7",
            title="four spot nodes as a trace has them, through none at all",
            spec=_SPOT,
            events=traces.events(_HELD, _SPOT.nodes, seconds_per_hour=_S_PER_HOUR),
            window_s=_HELD.hours * _S_PER_HOUR,
            notes=(
                *NOTES,
                *_GOING,
                *_COMING,
                f"The trace is {_HELD.file} of {_HELD.source}, {_HELD.hours:g} hours of it from"
                f" hour {_HELD.start_hour:g} on, an hour a minute; nodes go without notice.",
            ),
            quick_events=_kill_and_return(("n1", "n2"), 1.0, 3.0),
        ),
        Scenario(
            name="S8",
            title="two nodes, then four, then three",
            spec=_nodes((0.4, 0.4), _GIGABIT),
            events=(
                *(Event(at_s=20.0, action="add", node=n.name, spec=n) for n in _JOINING),
                Event(at_s=70.0, action="drain", node="n2", deadline_s=20.0),
            ),
            window_s=120.0,
            notes=(
                *NOTES,
                *_GOING,
                *_COMING,
                *_NOTICE,
                "raycloud's global batch is 64 throughout. Who splits equally computes 16 samples"
                " per worker and step, so 32 at two nodes.",
            ),
        ),
        Scenario(
            name="S9",
            title="two zones, a thin and long trunk between",
            spec=Spec(
                nodes=tuple(
                    _node(i, 0.4, _GIGABIT, zone="a" if i < 3 else "b") for i in range(1, 5)
                ),
                trunks=(TrunkSpec(zones=("a", "b"), rate_bits_per_s=20 * _MEGABIT, delay_s=0.04),),
            ),
        ),
    )
}
