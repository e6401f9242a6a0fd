"""Control against a small simulated fleet: it never sticks, and what it counts is exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from raycloud import commands as c
from raycloud.control import Control, ControlSettings, MemberState
from raycloud.control.heartbeats import Heard
from raycloud.order import Ledger, read_ledger
from tests.control_events import ready, stop
from tests.control_fleet import Fleet
from tests.control_scene import Scene
from tests.tiers import examples

times_s = st.sampled_from([0.0, 0.9, 2.5, 5.0, 9.0, 14.0, 30.0])
FAULTS = [*3 * ["none"], *3 * ["dies_s"], *2 * ["freezes_s"], "fails_s", "ready"]


@st.composite
def scenes(draw, *, faults=True):
    """Drawn from few values, so that long and eventful runs are as common as short ones."""
    global_batch = draw(st.sampled_from([1, 5, 8, 12]))
    drop_last = draw(st.booleans())
    fault = {}
    if faults:
        kind = draw(st.sampled_from(FAULTS))
        if kind == "ready":
            fault["never_ready"] = True
        elif kind == "dies_s":
            fault[kind] = tuple(draw(st.lists(times_s, min_size=1, max_size=3)))
        elif kind != "none":
            fault[kind] = draw(times_s)
        fault["clumsy"] = draw(st.sampled_from([0, 0, 1, 9]))
        fault["leaves_s"] = tuple(draw(st.lists(times_s, max_size=2)))
        fault["breaks_s"] = tuple(draw(st.lists(times_s, max_size=3)))
        fault["diverges_s"] = tuple(draw(st.lists(times_s, max_size=3)))
        stops = draw(st.sampled_from([0, 0, 1, 1, 2]))
        fault["stops_s"] = tuple(draw(times_s) for _ in range(stops))
    return Scene(
        settings=ControlSettings(
            min_workers=(fewest := draw(st.sampled_from([1, 1, 1, 2]))),
            max_workers=max(fewest, draw(st.sampled_from([1, 2, 2, 3, 4]))),
            capacity=draw(st.sampled_from([1, 4, 4])),
            global_batch=global_batch,
            micro_batch=draw(st.sampled_from([1, 1, 3])),
            drop_last=drop_last,
            shares=draw(st.sampled_from(["auto", "auto", "equal"])),
            reshare_every_s=1.0,
            reshare_steps=4,
            return_s=draw(st.sampled_from([0.0, 5.0, 90.0, 90.0])),
            spawn_s=20.0,
            form_s=20.0,
            silence_s=20.0,
        ),
        samples=draw(st.integers(global_batch if drop_last else 1, 50)),
        steps=draw(st.sampled_from([1, 7, 40, 90, 150])),
        every=draw(st.sampled_from([None, 1, 10, 33])),
        seed=draw(st.integers(0, 10**6)),
        delay_s=draw(st.sampled_from([0.0, 0.1, 2.0])),
        rooms=tuple(draw(st.lists(st.tuples(times_s, st.integers(0, 6)), max_size=3))),
        grows=tuple(draw(st.lists(st.tuples(times_s, st.sampled_from([1, 7, 30])), max_size=3))),
        speeds=draw(st.sampled_from([(0.05,), (0.02, 0.1), (0.02, 0.02, 0.09), (0.1, 0.3)])),
        **fault,
    )


def counted(spans, step):
    """How often each sample of each epoch was taken in the steps before `step`."""
    taken = Counter()
    for at, (epoch, first, last) in spans.items():
        taken.update((epoch, i) for i in range(first, last) if at < step)
    return taken


def held_after(command, held):
    """The members whose processes are held, and -1 less than each that is left out, afterwards."""
    match command:
        case c.Spawn(members=members):
            assert not held & set(members)
            return held | set(members)
        case c.Release(members=members):
            return held - {m for at in members for m in (at, -1 - at)}
        case c.LeaveOut(member=member):
            assert member in held
            return held - {member} | {-1 - member}
        case c.Readmit(member=member, process=process):
            assert member not in held
            assert -1 - process in held
            return held - {-1 - process} | {member}


def check_commands(fleet):
    """Commands are legal in themselves and in their order."""
    finish, release = fleet.finish(), fleet.commands[-2]
    assert isinstance(finish, c.Finish)
    assert isinstance(release, c.Release)
    assert set(release.members) == set(fleet.job.members)
    assert sum(isinstance(x, c.Finish) for x in fleet.commands) == 1
    publishes = [x for x in fleet.commands if isinstance(x, c.Publish)]
    rising = [x.step for x in publishes] == sorted({x.step for x in publishes})
    assert rising or fleet.scene.diverges_s  # some may be withdrawn
    assert all(tuple(x.parts) in fleet.divided for x in publishes)
    check_vacancies(fleet)
    prepares = [x for x in fleet.commands if isinstance(x, c.Prepare)]
    assert [x.number for x in prepares] == list(range(1, len(prepares) + 1))
    generation, group, halted = fleet.scene.settings.first_generation - 1, (), False
    spawned, coming = set(), None
    most = fleet.scene.settings.max_workers + bool(fleet.scene.leaves_s)  # until its state is had
    for x in fleet.commands:
        match x:
            case c.Spawn() | c.Release() | c.LeaveOut() | c.Readmit():
                spawned = held_after(x, spawned)
            case c.Form():
                assert x.generation > generation
                assert set(x.members) <= spawned
                assert len(x.members) <= most
                generation, group, halted, coming = x.generation, x.members, False, None
                assert sum(x.shares) == fleet.scene.settings.micro_batches
                assert min(x.shares) >= 0
            case c.Prepare():
                group, coming = coming or group, None  # there is one change at a time
                assert x.members == group
                assert not halted
                halted = isinstance(x.change, c.Halt)
        if isinstance(x, c.Prepare) and isinstance(x.change, c.Meet):
            coming = x.change.members
            assert set(coming) <= spawned
            assert len(coming) <= most
        if isinstance(x, c.Prepare) and isinstance(x.change, c.Reshare | c.Meet):
            assert x.change.generation == (generation := generation + 1)
            assert sum(x.change.shares) == fleet.scene.settings.micro_batches
            assert min(x.change.shares) >= 0


def check_vacancies(fleet):
    """Only the place of one that was lost may be another's, and one other's alone."""
    spawns = [x for x in fleet.commands if isinstance(x, c.Spawn)]
    vacant = [vacancy.member for x in spawns for vacancy in x.vacancies]
    assert len(set(vacant)) == len(vacant)
    assert all(fleet.job.members[member] is MemberState.LOST for member in vacant)
    assert all(len(x.vacancies) <= len(x.members) for x in spawns)


def check_ledger(fleet):
    """What is written is what was committed: a prefix, exactly once."""
    if fleet.job.ledger is None:
        assert not fleet.lines
        return
    ledger = read_ledger(fleet.lines)
    step = fleet.job.committed_step
    assert ledger.state() == fleet.job.ledger.state()
    assert ledger.audit(through=fleet.job.position_at(step)).exact
    check_samples(fleet, ledger, counted(fleet.spans, step))
    for at, (position, state) in fleet.manifests.items():
        kept, sizes = fleet.saved[at]
        assert position == kept
        assert ((0, state["samples"]), *map(tuple, state.get("later", ()))) == sizes
        assert Ledger.from_state(state).audit(through=position).exact


def check_samples(fleet, ledger, taken):
    """Every epoch holds each of its samples once; `drop_last` leaves less than a step out."""
    assert ledger.committed_samples == taken.total()
    assert set(taken.values()) <= {1}
    epochs = Counter(epoch for epoch, _ in taken)
    for epoch, samples in epochs.items():
        assert ledger.samples_in(epoch) == fleet.size(epoch)
        if epoch < max(epochs):
            left = fleet.size(epoch) - samples
            least = fleet.scene.settings.global_batch if fleet.scene.settings.drop_last else 1
            assert 0 <= left < least


@examples(60)
@given(scenes(faults=False))
def test_without_faults_every_step_is_committed(scene):
    fleet = Fleet(scene).run()
    assert fleet.finish() == c.Finish(status="finished")
    assert fleet.job.committed_step == scene.steps
    assert fleet.published == scene.steps
    check_commands(fleet)
    check_ledger(fleet)


@examples(100)
@given(scenes())
def test_whatever_happens_the_run_ends_and_is_exact(scene):
    fleet = Fleet(scene).run()
    check_commands(fleet)
    check_ledger(fleet)
    match fleet.finish().status:
        case "finished":
            assert fleet.published == fleet.job.committed_step == scene.steps
            assert not fleet.finish().error
        case "stopped":
            assert scene.stops_s or fleet.gave_up
            if (
                len(scene.stops_s) + fleet.gave_up == 1
                and fleet.job.ledger
                and fleet.published is not None
            ):
                assert fleet.published == fleet.job.committed_step
        case "failed":
            assert fleet.finish().error
    late = ready(fleet.group[0], samples=1) if fleet.group else stop("late")
    assert not fleet.job.on(late, fleet.now_s)


@examples(30)
@given(st.lists(scenes(), min_size=1, max_size=3), scenes(faults=False))
def test_a_run_resumed_again_and_again_is_exact(tries, last):
    lines, manifest, generation, samples, spans = [], None, 0, last.samples, {}
    for i, scene in enumerate([*tries, last]):
        more = {}
        if manifest is not None:
            step, (position, ledger), sizes = manifest
            more = {"step": step, "position": position, "ledger": ledger}
            samples += scene.seed % 3  # the data has grown between two starts, or not
        base = {f.name: getattr(scene.settings, f.name) for f in fields(ControlSettings)}
        base.update(
            global_batch=last.settings.global_batch,
            micro_batch=last.settings.micro_batch,
            drop_last=last.settings.drop_last,
            first_generation=generation,
            first_member=10 * i,
            **more,
        )
        values = {f.name: getattr(scene, f.name) for f in fields(Scene)}
        values.update(settings=ControlSettings(**base), samples=samples, steps=last.steps)
        if manifest is not None:
            values.update(sizes=sizes)
        fleet = Fleet(Scene(**values)).run()
        check_commands(fleet)
        samples = fleet.samples
        spans.update(fleet.spans)
        lines += fleet.lines
        generation = fleet.job.generation + 1
        if fleet.published is not None:
            step = fleet.published
            manifest = (step, fleet.manifests[step], fleet.saved[step][1])
    assert fleet.finish().status == "finished"
    ledger = read_ledger(lines)
    assert ledger.audit(through=fleet.job.position_at(last.steps)).exact
    assert ledger.next_step == last.steps
    check_samples(fleet, ledger, counted(spans, last.steps))


@examples(25)
@given(scenes())
def test_the_same_events_give_the_same_commands(scene):
    fleet = Fleet(scene).run()
    twin = Control(scene.settings)
    for cause, now_s, commands in fleet.log:
        if cause is None:
            again = twin.start(now_s)
        elif cause == "tick":
            again = twin.tick(now_s)
        elif isinstance(cause, Heard):
            twin.hear(cause)
            again = ()
        else:
            again = twin.on(cause, now_s)
        assert again == commands
