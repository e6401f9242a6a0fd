"""A whole run of real members, started again until it has ended; and what must come of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import numpy as np

from raycloud.checkpoint import latest
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import RaycloudError
from raycloud.order import read_ledger, stream_seed
from raycloud.recovery import catch_up, state_transfer
from raycloud.simulate.world import World
from raycloud.step.state import digest
from raycloud.sync import period as sync_period
from raycloud.sync.period import Choice, Seen
from raycloud.worker import calibration
from raycloud.worker import period as worker_period
from tests.scenario.cluster import Story, ThreadCluster
from tests.scenario.faults import Blow, Faults, script
from tests.scenario.fleet import Disk, Fleet, Seat
from tests.scenario.stage import Process, Stage
from tests.scenario.task import apart, asked, same_steps, undisturbed
from tests.scenario.wires import Wires

if TYPE_CHECKING:
    from torch import Tensor

    from raycloud.checkpoint import Manifest

TOLERANCE = 1e-9
LOSSY_TOLERANCE = 0.3  # with a codec; among each other members must still be bit-equal
ROUNDS_TOLERANCE = 0.8  # with another algorithm; the same holds
_ASKED = ("norm", "steps", "alike", "every_steps", "least", "members", "shares", "bad", "spoils")
_UNTIL_S = 3000.0
_RESTART_S = (1.0, 5.0)
_STARTS = 30
_COPIES_S = (0.0, 0.1)  # a tensor of a state that is passed on
_LOADS_S = (0.0, 0.5)
_OFTEN_NARROW = 0.4  # the chance that there is little room for steps that are kept
_NARROW_BYTES = 20_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained by how many, and what befalls them.

    Attributes:
        seed: Of everything that is left to chance.
        members: Most members, each on a machine of its own.
        least: Fewest that it may run with.
        norm: The model has batch statistics.
        speeds: Seconds per micro-batch, by machine.
        blows: What befalls them.
        steps: The job's length.
        every_steps: Steps between two checkpoints; `auto`: as they are worth it; None: at the end.
        shares: `auto` or `equal`.
        alike: All members begin with the same parameters.
        bad: Samples for which they go back, and leave out the step.
        spoils: These spoil the parameters, where else their loss is not finite.
        at_once: Who joins takes the state where all meet, once it is known how fast links are.
        codec: How gradients travel.
        topology: Between whom; `auto` is direct with a codec; machines are in two zones in turns.
        period: Steps between two exchanges, but for 1 rounds that move weights by Nesterov's; of
            `auto` they are 4, 1, 2 and 3 steps long in turns.
        stream: Fragments that travel within rounds.
    """

    seed: int
    members: int
    least: int
    norm: bool
    speeds: tuple[float, ...]
    blows: tuple[Blow, ...]
    steps: int = 200
    every_steps: int | str | None = 20
    shares: str = "auto"
    alike: bool = True
    bad: tuple[int, ...] = ()
    spoils: bool = False
    at_once: bool = False
    codec: str = "none"
    topology: str = "auto"
    period: int | Literal["auto"] = 1
    stream: int = 1

    @property
    def tolerance(self) -> float:
        """How far entries may be from those of an undisturbed run that is exact."""
        if self.period != 1:
            return ROUNDS_TOLERANCE
        return TOLERANCE if self.codec == "none" else LOSSY_TOLERANCE


def drawn(seed: int, *, count: int = 10, steps: int = 200) -> Scenario:
    """By chance: so many faults in so many steps."""
    chance = np.random.Generator(np.random.PCG64(stream_seed(seed, 8)))
    members = int(chance.integers(2, 6))
    base_s = float(chance.choice([0.01, 0.03, 0.08]))
    return Scenario(
        seed=seed,
        members=members,
        least=int(chance.integers(1, max(1, members // 2) + 1)),
        norm=bool(chance.random() < 0.7),
        speeds=tuple(base_s * float(chance.choice([1.0, 1.3, 3.0])) for _ in range(members)),
        blows=script(seed, members=members, steps=steps, count=count),
        steps=steps,
        every_steps=(steps // 10, steps // 10, 7, "auto")[int(chance.integers(4))],
        shares="auto" if chance.random() < 0.8 else "equal",
        at_once=bool(chance.random() < 0.3),
    )


@dataclass(kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        befallen: How many faults befell it.
        returned: How often a process came back that was given up.
        mistaken: How often a member was given up that was well.
        apart: The largest difference of an entry from the undisturbed run's.
        digest: Of the story.
        wrong: Which promises were broken.
    """

    status: str
    virtual_s: float
    starts: int
    members: int
    generations: int
    recoveries: int
    befallen: int
    returned: int
    mistaken: int
    apart: float
    digest: str
    story: list[str] = field(repr=False)
    wrong: list[str]


def _untold(_: object, compute: Callable[[], object]) -> None:
    """What a pass takes of the memory of this process, which all members share."""
    compute()


def _in_turns(now: Choice, _: Sequence[Seen]) -> tuple[Choice, str]:
    return Choice(now.number + 1, (4, 1, 2, 3)[now.number % 4], now.most), "it is its turn"


class _Run:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.stage = Stage(self.world)
        self.story = Story(folder=folder, world=self.world)
        self.faults = Faults(scenario.blows, self.stage, self.story)
        self.stage.passing = self._passes
        self.up = [True] * scenario.members
        names = (*_ASKED, "codec", "topology", "period", "stream")
        self.job = asked(**{name: getattr(scenario, name) for name in names})
        self.starts = 0
        self.states: dict[tuple[int, int], dict[tuple[Seat, int], str]] = {}

    def go(self) -> Outcome:
        """To its end."""
        status = "broken"
        with self._staged():
            while not self.wrong and status != "finished":
                status = self._start()
            self.stage.close()
        found = self._check_result() if not self.wrong else float("nan")
        return Outcome(
            status="broken" if self.wrong else status,
            virtual_s=self.world.now_s,
            starts=self.starts,
            members=self.story.spawned,
            generations=self.story.generation + 1,
            recoveries=self.story.recoveries,
            befallen=self.faults.befallen,
            returned=self.story.returned,
            mistaken=self.story.mistaken,
            apart=found,
            digest=self.world.log.digest(),
            story=self.story.told,
            wrong=self.wrong,
        )

    @property
    def wrong(self) -> list[str]:
        return self.story.wrong + self.stage.wrong

    @contextlib.contextmanager
    def _staged(self) -> Iterator[None]:
        """A state is copied and read slowly, so that something may befall who does it."""
        copy = self._slowly(state_transfer._copy, _COPIES_S, "copy")
        take = self._slowly(state_transfer.Receiver.take, _LOADS_S, "load")
        with (
            mock.patch.object(state_transfer, "_copy", copy),
            mock.patch.object(state_transfer.Receiver, "take", take),
            mock.patch.object(catch_up, "room_bytes", self._room_bytes),
            mock.patch.object(calibration, "peak_bytes", _untold),
            mock.patch.object(worker_period, "choose", _in_turns),
            mock.patch.object(worker_period, "_FIRST_LOOK_STEPS", 2),
            mock.patch.multiple(sync_period, _LOOK_STEPS=2, _LOOK_ROUNDS=1),
        ):
            yield

    def _slowly(
        self, act: Callable[..., Any], takes_s: tuple[float, float], point: str
    ) -> Callable[..., Any]:
        """The same, where something may befall who does it."""

        def slowly(*told: Any) -> Any:
            self.stage.wait(self.world.between(*takes_s), point)
            return act(*told)

        return slowly

    def _room_bytes(self, _: int | None) -> int:
        return self.world.below(_NARROW_BYTES) if self.world.likely(_OFTEN_NARROW) else 2**30

    def _passes(self, process: Process, point: str) -> None:
        assert isinstance(process, Seat)
        if point == "compute" and process.step > process.checked:
            process.checked = process.step
            self._check_state(process)
            self.faults.reached(process.step)
        elif point == "build":
            self.faults.reached(-1)
        self.faults.passes(process, point)

    def _check_state(self, seat: Seat) -> None:
        """Members that live and compute the same step, on the same way, have the same bits."""
        if not seat.counts_as(seat.number):
            return
        tensors = seat.member._worker._replica.state.tensors()
        names = same_steps(tuple(tensors))
        if self.scenario.period != 1:  # members have moments of their own
            names = [name for name in names if not name.startswith("optimizer/")]
        own = digest((name, tensors[name]) for name in names)
        others = self.states.setdefault((self.story.rolled_back, seat.step), {})
        for (other, number), found in others.items():
            if other.counts_as(number) and other.fleet is seat.fleet and found != own:
                self.story.wrong.append(f"before step {seat.step} {seat} and {other} differ")
        others[seat, seat.number] = own

    def _start(self) -> str:
        world, story = self.world, self.story
        self.starts += 1
        if self.starts > _STARTS:
            story.wrong.append(f"it was started {_STARTS} times, and has not finished")
            return "broken"
        while sum(self.up) < self.scenario.least:
            world.happen()
        manifest = latest(Disk(self.stage, story.folder)).manifest
        story.tell(f"! start {self.starts} from {manifest.step if manifest else 'nothing'}")
        speeds = list(self.scenario.speeds)
        fleet = Fleet(self.stage, Wires(self.stage), speeds, self.up)
        start = ThreadCluster(self.job, fleet, story, manifest, at_once=self.scenario.at_once)
        self.faults.start, self.faults.fleet = start, fleet
        try:
            start.start()
            while start.finish is None and not self.wrong:
                if world.next_s > _UNTIL_S:
                    story.wrong.append(f"stuck in {start.control.phase}: the run does not end")
                else:
                    world.happen()
        except RaycloudError as error:  # control does not allow what has happened
            story.wrong.append(f"{type(error).__name__}: {error}")
        self.faults.start = self.faults.fleet = None
        if not self.wrong:
            self._check_start(start, fleet, manifest)
        fleet.close()
        restart_s = world.now_s + world.between(*_RESTART_S)
        while world.next_s <= restart_s:
            world.happen()
        return "broken" if start.finish is None else start.finish.status

    def _check_start(self, start: ThreadCluster, fleet: Fleet, manifest: Manifest | None) -> None:
        """What a start has left behind is whole."""
        control, wrong = start.control, self.story.wrong
        if control.ledger is None:
            return
        ledger = read_ledger(self.story.lines)
        step = control.committed_step
        audit = ledger.audit(through=control.position_at(step))
        if ledger.state() != control.ledger.state() or ledger.next_step != step:
            wrong.append(f"the ledger's file has {ledger.next_step} steps, {step} count")
        if not audit.exact:
            wrong.append(f"the ledger is not exact: {audit}")
        if start.finish is None or start.finish.status != "finished":
            return
        if step != self.scenario.steps:
            wrong.append(f"finished after {step} steps, {self.scenario.steps} were asked for")
        wanted, looked_at = self._wanted(), 0
        for seat in fleet.all:  # released by now, but for its end its state is what it was
            if seat.number in control.group and not seat.member._worker._transition.lacking:
                looked_at += 1
                difference = apart(dict(seat.member._worker._replica.model.state_dict()), wanted)
                if not difference <= self.scenario.tolerance:
                    wrong.append(f"{seat} is {difference:g} from the undisturbed run at the end")
        if not looked_at:
            wrong.append("it finished, and nobody has its state")

    def _wanted(self) -> dict[str, Tensor]:
        it = self.scenario
        double = it.codec == "none"
        return undisturbed(norm=it.norm, steps=it.steps, bad=it.bad, double=double)

    def _check_result(self) -> float:
        """The newest checkpoint is that of the end, and what an undisturbed run has there."""
        store = Disk(self.stage, self.story.folder)
        found = latest(store).manifest
        if found is None or found.step != self.scenario.steps:
            self.story.wrong.append(f"the newest checkpoint is {found and found.step}")
            return float("nan")
        tensors = load_tensors(store, found)
        model = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
        difference = apart(model, self._wanted())
        if not difference <= self.scenario.tolerance:
            self.story.wrong.append(f"the checkpoint is {difference:g} from the undisturbed run")
        return difference


def play(scenario: Scenario, folder: Path) -> Outcome:
    """Carry a scenario out; the same one gives the same story.

    Args:
        scenario: What happens.
        folder: An empty one, for its checkpoints.
    """
    return _Run(scenario, folder).go()
