"""Where a step is not finite all members go back, and on without the step that made it so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.errors import DivergedError

if TYPE_CHECKING:
    from torch import nn

    from raycloud.order import Skip
    from raycloud.training.replica import Replica


class RollbackError(Exception):
    """This generation ends here: its members are to go back to a checkpoint, and meet anew.

    Args:
        step: The one that is not finite.
        why: In words.
        left_out: The step that is not to change anything on the second way; None: no other.
    """

    def __init__(self, step: int, why: str, left_out: int | None) -> None:
        """Nothing of `step` is kept."""
        super().__init__(why)
        self.step, self.why, self.left_out = step, why, left_out


def give_up(replica: Replica, step: int, why: str) -> RollbackError:
    """A step is not finite: nothing of it remains, and it is found out which one made it so.

    Where the parameters are finite before it, that was its own samples; else the last update did.

    Raises:
        DivergedError: No update was made before it: going back does not help.
    """
    replica.discard()
    if is_finite(replica.model):
        return RollbackError(step, f"{why} at step {step}", step)
    made_by = newest_update(step, replica.history.skips)
    if made_by < 0:
        raise DivergedError(
            f"the parameters are not finite before step {step}, the first that could change them",
            hint="look at Task.model",
        )
    return RollbackError(
        step, f"{why} at step {step}, and the parameters are not finite before it", made_by
    )


def newest_update(step: int, skips: tuple[Skip, ...]) -> int:
    """The newest step before this one that was not skipped as a whole; -1: there is none.

    >>> newest_update(7, ())
    6
    """
    without = {skip.step for skip in skips if skip.whole_step}
    step -= 1
    while step in without:
        step -= 1
    return step


def check(model: nn.Module, step: int) -> None:
    """Whether one may go on from the checkpoint of `step`, which is loaded.

    Raises:
        RollbackError: Its parameters are not finite: an older one is needed.
    """
    if not is_finite(model):
        raise RollbackError(step, f"the checkpoint of step {step} is not finite", None)


def check_end(replica: Replica, step: int) -> None:
    """Whether the run may end here: no step follows that would tell.

    Raises:
        RollbackError: The parameters are not finite, and the job goes back then.
    """
    goes_back = replica.errors.on_nan == "rollback" and replica.following is None
    if goes_back and not is_finite(replica.model):
        raise give_up(replica, step, "the run would end")


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters are; each is read once."""
    return all(bool(p.detach().isfinite().all()) for p in model.parameters())
