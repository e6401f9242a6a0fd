"""What is wrong with what was asked, and how it is told: one error for all mistakes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raycloud.errors import SpecError

Where = Callable[[str], str]  # dotted field -> the place it was written, e.g. `gpt.yaml:12`, or ""

_LONGEST = 80  # characters of a name or value that a message repeats
_MOST_LISTED = 20  # mistakes that one message lists


class _Shown(str):
    """Text that stands for a value in a message as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The text itself."""
        return str(self)


def shortened(text: str) -> str:
    """Text short enough for a message: what is too long is cut in the middle."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}…{text[-19:]}"


NOT_SET = _Shown("(not set)")  # the value of a field that nobody wrote


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        field: Dotted name, e.g. `elastic.min_workers`.
        value: What was written there, or `NOT_SET`.
        problem: What is wrong with it; follows `field = value:`.
        hint: What would do.
        meant: The known field that an unknown one probably stands for.
    """

    field: str
    value: object
    problem: str
    hint: str
    meant: str = ""

    def as_error(self) -> SpecError:
        """The mistake as an error of its own; a long value is cut in the middle."""
        value = _Shown(shortened(repr(self.value)))
        return SpecError(shortened(self.field), value, self.problem, hint=self.hint)


class SpecErrors(SpecError):
    """Several fields of the job are wrong: the first is in `field`, `value` and `problem`.

    Attributes:
        message: Every mistake, each with its remedy; `hint` is empty.
        all: Each mistake as an error of its own, in the order of the message.
    """

    def __init__(self, errors: Sequence[SpecError]) -> None:
        """Compose one message that lists every mistake with its remedy."""
        first = errors[0]
        super().__init__(first.field, _Shown(first.value), first.problem)
        self.all: tuple[SpecError, ...] = tuple(errors)
        lines = [f"{len(errors)} mistakes in the job:"]
        for error in errors[:_MOST_LISTED]:
            lines.append(f"  - {error.message}")
            lines += [f"    hint: {error.hint}"] if error.hint else []
        if len(errors) > _MOST_LISTED:
            lines.append(f"  and {len(errors) - _MOST_LISTED} more")
        self.message = "\n".join(lines)

    @property
    def others(self) -> tuple[SpecError, ...]:
        """The mistakes after the first."""
        return self.all[1:]


def refusal(mistakes: Sequence[Mistake], where: Where | None = None) -> SpecError:
    """The one error to raise for these mistakes, at least one; `where` adds the place of each."""
    return combined([_placed(mistake, where).as_error() for mistake in mistakes])


def combined(errors: Sequence[SpecError]) -> SpecError:
    """The one error to raise for these errors, at least one."""
    return errors[0] if len(errors) == 1 else SpecErrors(errors)


def _placed(mistake: Mistake, where: Where | None) -> Mistake:
    place = where(mistake.field) if where is not None else ""
    return replace(mistake, problem=f"{mistake.problem} ({place})") if place else mistake
