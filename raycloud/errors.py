"""The exception tree: whose fault, which field.

    RaycloudError
    ├── JobError                what was asked cannot be done: the job's fault
    │   ├── SpecError           a field of the job file or an argument
    │   ├── TaskError           the user's task code raised or broke its contract
    │   ├── DataError           the data set is missing or unreadable
    │   ├── DivergedError       the loss or a gradient is no longer a finite number
    │   └── RunDirectoryError   the run directory is taken, missing or of another job
    ├── MachineError            the machines', links' or disks' fault
    │   ├── PlacementError      the cluster has no room for what was asked
    │   ├── MemberLostError     a worker or server died or went silent
    │   ├── TransportError      an exchange between members broke
    │   └── CheckpointError     a checkpoint is missing, damaged or cannot be written
    └── InternalError           raycloud's own fault: please report it
        └── DealingError        members have trained on other samples than they were to

Every error says what happened in one sentence and, in `hint`, what would do. Errors cross actors,
so each one survives pickling with all of its fields.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "DealingError",
    "DivergedError",
    "InternalError",
    "JobError",
    "MachineError",
    "MemberLostError",
    "PlacementError",
    "RaycloudError",
    "RunDirectoryError",
    "SpecError",
    "TaskError",
    "TransportError",
]


class RaycloudError(Exception):
    """Base of everything raycloud raises on purpose.

    Attributes:
        message: What happened, in one sentence.
        hint: What the reader can do about it; empty where nothing can be said.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """The message, then the hint after a blank line."""
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the class and its attributes, whatever the signature of `__init__`."""
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def public_name(error: RaycloudError) -> str:
    """The name of the error's first class that stands in this file: what another process knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in __all__)


def _rebuild(
    kind: type[RaycloudError], args: tuple[object, ...], fields: dict[str, object]
) -> RaycloudError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class JobError(RaycloudError):
    """What was asked cannot be done."""


class SpecError(JobError):
    """A field of the job is wrong.

    Attributes:
        field: Dotted name of the field, e.g. `elastic.min_workers`.
        value: The offending value as the user wrote it.
    """

    def __init__(self, field: str, value: object, problem: str, *, hint: str = "") -> None:
        """Compose `field: value: problem`; `hint` is the remedy."""
        super().__init__(f"{field} = {value!r}: {problem}", hint=hint)
        self.field = field
        self.value = repr(value)
        self.problem = problem


class TaskError(JobError):
    """The user's task code raised, or broke the contract of `raycloud.Task`."""


class DataError(JobError):
    """The data set is missing, empty or unreadable."""


class DivergedError(JobError):
    """The loss or a gradient is no longer a finite number."""


class RunDirectoryError(JobError):
    """The run directory is taken, missing, or belongs to another job."""


class MachineError(RaycloudError):
    """A machine, link or disk failed or is not enough."""


class PlacementError(MachineError):
    """The cluster has no room for what was asked."""


class MemberLostError(MachineError):
    """A member died or went silent."""


class TransportError(MachineError):
    """An exchange between members broke."""


class CheckpointError(MachineError):
    """A checkpoint is missing, damaged, or cannot be written."""


class InternalError(RaycloudError):
    """Raycloud broke one of its own promises."""


class DealingError(InternalError):
    """Members have trained on other samples than their steps take, or not on each of them once."""
