"""Going back to a checkpoint in place: the process, its model and its data stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.checkpoint import load
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import CheckpointError
from raycloud.training.rollback import check

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest, Store
    from raycloud.commands import Back
    from raycloud.training.config import MemberConfig
    from raycloud.training.footing import Footing
    from raycloud.training.replica import Replica


class Restoring:
    """Loads the checkpoints that a member is told to go back to, each once.

    Args:
        store: Where they are.
        replica: This member's.
    """

    def __init__(self, store: Store, replica: Replica) -> None:
        """It stands where it began."""
        self._store, self._replica = store, replica
        self._ahead: Manifest | None = None
        self._gone_back = -1

    def begin(self, config: MemberConfig, origin: Manifest | None) -> None:
        """Load what the run starts from, or is going to go back to, while others are still to come.

        The latter may be gone where a place was long in coming, and the others have the state then:
        if it is still needed, `go_back` says what is wrong.

        Raises:
            CheckpointError: What the run starts from cannot be loaded.
            TaskError: It is of another model, optimizer or schedule.
        """
        if config.back:
            try:
                ahead = load(self._store, config.back)
                self._load(ahead)
                self._ahead = ahead
            except CheckpointError as error:
                what = f"the checkpoint of step {config.back} could not be loaded ahead"
                self._replica.notice(what, {"why": error.message})
        elif origin is not None and not config.joins:
            self._load(origin)

    def begin_anew(self) -> None:
        """It is another member from now on, with none of the states that it had."""
        self._ahead, self._gone_back = None, -1

    def go_back(self, back: Back, footing: Footing) -> None:
        """Stand where the checkpoint does, unless that was done when it was told before.

        Raises:
            CheckpointError: It cannot be loaded; or this member has loaded one, and is to begin at
                the beginning.
            TaskError: It is of another model, optimizer or schedule.
            RollbackError: It is not finite, and the job goes back then.
        """
        state = self._replica.state
        if back.generation <= self._gone_back:
            return
        self._gone_back, ahead, self._ahead = back.generation, self._ahead, None
        if back.step == 0:
            if ahead is not None:
                raise CheckpointError(
                    f"it began from step {ahead.step}, and all go back to the beginning",
                    hint="another worker comes in its place",
                )
            state.left_out |= set(back.without)  # it is new
            return
        if ahead is None or ahead.step != back.step or footing.loop is not None:
            ahead = load(self._store, back.step)
            if self._replica.kept is not None:
                self._replica.discard()
            self._load(ahead)
            self._replica.statistics.settle()
        state.left_out |= set(back.without)
        footing.go_back(ahead)
        if self._replica.errors.on_nan == "rollback":
            check(self._replica.model, back.step)

    def _load(self, manifest: Manifest) -> None:
        self._replica.state.load(load_tensors(self._store, manifest), manifest.values)


def started_from(config: MemberConfig, store: Store) -> Manifest | None:
    """The checkpoint that the run has started from."""
    if config.joins or config.resume_step is None:
        return config.origin
    return load(store, config.resume_step)
