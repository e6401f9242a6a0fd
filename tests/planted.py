"""Bugs that code like this has had: each a small change, and what it breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A bug that is planted.

    Attributes:
        file: Below `raycloud/`.
        old: What stands there exactly once.
        new: What is put in its place.
        breaks: What is wrong then.
        tests: Patterns of the files of tests that are to catch it; empty: those that know its room,
            in `tests/mutants.py`.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


MUTANTS = (
    Mutant(
        file="order/ledger.py",
        old="    if start < stop:\n        found.append((start, stop))\n",
        new="    if start < stop - 1:\n        found.append((start, stop))\n",
        breaks="a hole of one sample at the end of a range is not found",
    ),
    Mutant(
        file="order/steps.py",
        old="        if left < 0:\n            return Position(epoch=at.epoch, offset",
        new="        if left <= 0:\n            return Position(epoch=at.epoch, offset",
        breaks="the position after an epoch's last step lies behind the epoch's end",
    ),
    Mutant(
        file="order/commits.py",
        old="        epochs = epochs if grows is None else min(epochs, grows - here.epoch)\n",
        new="        epochs = epochs if grows is None else min(epochs, grows - here.epoch + 1)\n",
        breaks="the first epoch of grown data is counted with its old size",
    ),
    Mutant(
        file="order/assignment.py",
        old="    for r in by_remainder[: total - sum(floors)]:\n",
        new="    for r in by_remainder[1 : total - sum(floors)]:\n",
        breaks="a micro-batch of a short step is dealt to nobody",
    ),
    Mutant(
        file="order/lease.py",
        old="            heapq.heappush(self._back, (held.epoch, held.start, held.stop))\n",
        new="            heapq.heappush(self._back, (held.epoch, held.start, held.stop - 1))\n",
        breaks="the last sample that a lost worker held is not handed out again",
    ),
    Mutant(
        file="order/ledger.py",
        old="doubled += s.ranges(overlap(s.known(), commit.start, end))",
        new="doubled += s.ranges(overlap(s.committed, commit.start, end))",
        breaks="samples that were left out on purpose can be counted later",
    ),
    Mutant(
        file="order/ledger.py",
        old="        if doubled and refuse:\n            return doubled\n",
        new="        if doubled and refuse and len(doubled) > 1:\n            return doubled\n",
        breaks="a range that counted before is added once more before it is refused",
    ),
    Mutant(
        file="order/ledger_file.py",
        old="        if broken:\n            raise _damaged",
        new="        if broken and ledger is None:\n            raise _damaged",
        breaks="a damaged line in the midst of the ledger is passed over",
    ),
    Mutant(
        file="order/ledger_file.py",
        old="elif not doubled and (begin, first) != (due, step):",
        new="elif not doubled and begin != due:",
        breaks="an audit does not see that steps were moved",
    ),
    Mutant(
        file="control/data.py",
        old="            if at <= step:\n",
        new="            if at < step:\n",
        breaks="a checkpoint at the step where the data grew does not know that it has",
    ),
    Mutant(
        file="control/machine.py",
        old="data.commit(min(m.step for m in membership.holders()))",
        new="data.commit(max(m.step for m in membership.holders()))",
        breaks="a step counts when one member has committed it, and not all",
    ),
    Mutant(
        file="control/guards.py",
        old="isinstance(event, _MAY_BE_OLD) and event.generation < membership.sound_from:",
        new="isinstance(event, _MAY_BE_OLD) and event.generation < 0:",
        breaks="a checkpoint takes in a part that was divided among a generation that broke",
    ),
    Mutant(
        file="control/guards.py",
        old="    if not member.generation <= event.generation <= newest:\n",
        new="    if not event.generation <= newest:\n",
        breaks="a member's report of an older generation than its last one is accepted",
    ),
    Mutant(
        file="control/guards.py",
        old="    if sent is None or event.member not in sent.waits_for:\n",
        new="    if sent is None or sent.step not in {None, event.step}:\n",
        breaks="a member may apply the same change twice",
    ),
    Mutant(
        file="control/guards.py",
        old="event.change <= membership.settled:",
        new="event.change < membership.settled:",
        breaks="a late word about the change that was just withdrawn is taken for an illegal one",
    ),
    Mutant(
        file="control/checkpoints.py",
        old="        return tuple(member for member, key in keys.items() if key not in parts)\n",
        new="        return tuple(m for m in list(keys)[:-1] if keys[m] not in parts)\n",
        breaks="a checkpoint is published without the part of the last member",
    ),
    Mutant(
        file="control/membership.py",
        old="    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (times - 1)))\n",
        new="    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S))\n",
        breaks="the wait before another member is asked for never grows",
    ),
    Mutant(
        file="control/membership.py",
        old="            newest = max(newest, outstanding.change.generation)\n",
        new="            newest = max(newest, outstanding.change.generation - 1)\n",
        breaks="the number of a generation that was withdrawn is given away again",
    ),
    Mutant(
        file="control/shares.py",
        old="asked = [settings.shares[slot] for slot in slots if slot < len(settings.shares)]",
        new="asked = list(settings.shares[: len(slots)])",
        breaks="who is left gets the pinned shares of others",
    ),
    Mutant(
        file="control/membership.py",
        old="(g for g in self.groups if g <= generation)",
        new="(g for g in self.groups if g < generation)",
        breaks="words of a generation are held against the group before it",
    ),
    Mutant(
        file="step/state.py",
        old="if outside := [p for p in moved if id(p) not in known]:",
        new="if outside := [p for p in moved if id(p) not in known and not p.is_leaf]:",
        breaks="an optimizer may have parameters that the model has not",
        tests=("tests/unit/test_step_update.py",),
    ),
    Mutant(
        file="step/state.py",
        old="if parameter.requires_grad or parameter.grad is not None:",
        new="if parameter.requires_grad and not parameter.is_leaf:",
        breaks="what is unfrozen on the way is trained, and not exchanged",
        tests=("tests/unit/test_step_update.py",),
    ),
    Mutant(
        file="step/consistency.py",
        old="if digest.given > 1 and not digest.same:",
        new="if digest.given > 1 and digest.given < 1:",
        breaks="digests are exchanged, and not compared",
    ),
    Mutant(
        file="worker/loop.py",
        old="        self._consistency.look(self.step)\n        self._saved_step",
        new="        self._saved_step",
        breaks="replicas are not compared at a checkpoint",
        tests=("tests/unit/test_step_consistency.py",),
    ),
    Mutant(
        file="step/consistency.py",
        old="if not one[0] <= most]:",
        new="if not one[0] <= most * 1e9]:",
        breaks="what is trained apart on unlike processors counts as rounding",
    ),
    Mutant(
        file="control/guards.py",
        old="        if differing := other_samples(readies[0], ready):\n",
        new="        if differing := other_samples(ready, ready):\n",
        breaks="members that are given different samples train together",
    ),
    Mutant(
        file="step/contract.py",
        old="    seed_everything(stream_seed(job.seed, _TASK_STREAM))\n",
        new="",
        breaks="a split that is drawn without a generator is another one in each worker",
    ),
    Mutant(
        file="worker/calibration.py",
        old="            elif unlike > limit:\n",
        new="            elif unlike > 1e20 * limit:\n",
        breaks="a contrastive loss is fused",
        tests=("tests/unit/test_step_forward.py",),
    ),
    Mutant(
        file="step/collate.py",
        old="        if self.joins:\n            batch = concatenate(",
        new="        if group:\n            batch = concatenate(",
        breaks="graphs that were collated one by one are joined, offsets and all",
        tests=("tests/unit/test_step_collate.py",),
    ),
    Mutant(
        file="worker/loop.py",
        old="        if sums.places != all_places(many):\n",
        new="        if sums.places[0] > 2.0 * many:\n",
        breaks="a micro-batch that nobody computes, or two members do, is not seen",
        tests=("tests/unit/test_worker_tally.py",),
    ),
    Mutant(
        file="step/collate.py",
        old="            found[-1] = (m.epoch, found[-1][1], m.stop)\n",
        new="            found[-1] = (m.epoch, found[-1][1] - 1, m.stop - 1)\n",
        breaks="neighbouring micro-batches are read one sample too early",
        tests=("tests/unit/test_step_collate.py",),
    ),
    Mutant(
        file="worker/tally.py",
        old="        if self._collate.row_sum(spans) % ROWS != told:\n",
        new="        if told < 0:\n",
        breaks="samples that are not the step's are read, and nobody says so",
        tests=("tests/unit/test_worker_tally.py",),
    ),
    Mutant(
        file="control/guards.py",
        old="    if event.computed != many:\n",
        new="    if event.computed > many:\n",
        breaks="steps of which members have computed nothing are committed",
    ),
    Mutant(
        file="step/collate.py",
        old="(*before.micro_batches, *self.indices)",
        new="self.indices",
        breaks="what a member has kept of a step that broke counts as not computed",
        tests=("tests/scenario/test_training_faults.py",),
    ),
    Mutant(
        file="net/nccl.py",
        old="        if self._over.is_set():  # an abort ends it as if it were complete\n",
        new="        if self._over is None:  # an abort ends it as if it were complete\n",
        breaks="what an abort has left of an exchange is taken for its sum",
    ),
    Mutant(
        file="step/rounds.py",
        old="return [base - p.detach() for",
        new="return [p.detach() - base for",
        breaks="what members have moved in a round is undone twice",
        tests=("tests/unit/test_sync_rounds.py",),
    ),
    Mutant(
        file="step/replica.py",
        old="            scale *= weight\n",
        new="            scale *= 1.0\n",
        breaks="updates of a round are not weighted by what members have computed",
        tests=("tests/unit/test_sync_rounds.py",),
    ),
    Mutant(
        file="worker/transition.py",
        old="newest = Choice(*map(int, max(counts)[:3]))",
        new="newest = rounds.choice",
        breaks="who has not chosen how long rounds are goes on with another length",
        tests=("tests/scenario/test_training_faults.py",),
    ),
    Mutant(
        file="step/rounds.py",
        old="        again = at < self._stepped\n",
        new="        again = False\n",
        breaks="a step that is computed on by others moves the learning rate's schedule once more",
        tests=("tests/unit/test_sync_rounds.py",),
    ),
)
