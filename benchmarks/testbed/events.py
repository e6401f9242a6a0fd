"""One thing that happens to a node of a bed: what it may be, and how a file says it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from benchmarks.testbed.spec import HEAD, Direction, NodeSpec, SpecError, check_rate

Action = Literal[
    "kill-process",
    "kill-node",
    "freeze",
    "thaw",
    "cut",
    "mend",
    "throttle",
    "rate",
    "add",
    "drain",
]
Same = Literal["same"]

# The fields of each action besides `at_s` and `node`, and whether it must be given.
_FIELDS: Mapping[Action, Mapping[str, bool]] = {
    "kill-process": {"matching": True},
    "kill-node": {},
    "freeze": {},
    "thaw": {},
    "cut": {"direction": False},
    "mend": {},
    "throttle": {"cores": False},
    "rate": {"egress_bits_per_s": False, "ingress_bits_per_s": False},
    "add": {"spec": False},
    "drain": {"deadline_s": True},
}
_NOT_THE_HEAD = frozenset({"kill-node", "add", "drain"})


class ScheduleError(Exception):
    """A value in a schedule that cannot be; names the field, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens to one node.

    Attributes:
        at_s: Seconds after the schedule began.
        action: What happens.
        node: To whom.
        matching: `kill-process`: part of the command line of the process that gets SIGKILL; of
            several, the one that started last.
        direction: `cut`: what no longer passes, seen from the node; "both" when left out.
        cores: `throttle`: CPU quota from now on; None: no quota.
        egress_bits_per_s: `rate`: most it sends from now on; None: no limit; "same": as it was.
        ingress_bits_per_s: `rate`: the same for what it receives.
        deadline_s: `drain`: seconds of notice, after which it is killed.
        spec: `add`: what the node is; None: as it was in the bed's spec.
    """

    at_s: float
    action: Action
    node: str
    matching: str | None = None
    direction: Direction | None = None
    cores: float | None = None
    egress_bits_per_s: float | Same | None = "same"
    ingress_bits_per_s: float | Same | None = "same"
    deadline_s: float | None = None
    spec: NodeSpec | None = None

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            ScheduleError: One cannot be.
        """
        if self.action not in _FIELDS:
            raise ScheduleError(
                f"action: {self.action!r} is not possible; use one of {', '.join(_FIELDS)}"
            )
        where = f"{self.action} of {self.node!r}: "
        _check_seconds(f"{where}at_s", self.at_s, least=0.0)
        _check_name(f"{where}node", self.node, "a node's name")
        if self.node == HEAD and self.action in _NOT_THE_HEAD:
            raise ScheduleError(f"{where}the head always stays; name another node")
        self._check_fields(where)
        try:
            self._check_values(where)
        except SpecError as error:
            raise ScheduleError(f"{where}{error}") from None

    def _check_fields(self, where: str) -> None:
        """Check that fields of this action are given, and no others."""
        own = _FIELDS[self.action]
        for one in dataclasses.fields(self)[3:]:
            given = getattr(self, one.name) != one.default
            if given and one.name not in own:
                fields = f"it has {', '.join(own)}" if own else "it has none"
                raise ScheduleError(f"{where}{one.name}: no field of this action; {fields}")
            if not given and own.get(one.name):
                raise ScheduleError(f"{where}{one.name} is missing; add it")

    def _check_values(self, where: str) -> None:
        """Check what the fields of this action hold."""
        match self.action:
            case "kill-process":
                _check_name(
                    f"{where}matching", self.matching, "part of a command line, such as train.py"
                )
            case "cut":
                if self.direction not in (None, *get_args(Direction)):
                    raise ScheduleError(
                        f"{where}direction: {self.direction!r} is not possible; use both, in or out"
                    )
            case "throttle":
                _check_cores(f"{where}cores", self.cores)
            case "rate":
                _check_rates(where, self.egress_bits_per_s, self.ingress_bits_per_s)
            case "add":
                if self.spec is not None and self.spec.name != self.node:
                    raise ScheduleError(
                        f"{where}spec: its name is {self.spec.name!r}; use the node's"
                    )
            case "drain":
                _check_seconds(f"{where}deadline_s", self.deadline_s, least=0.1)
            case "kill-node" | "freeze" | "thaw" | "mend":
                pass

    @classmethod
    def read(cls, value: object) -> Event:
        """An event as a file gives it: a mapping of the fields above.

        Raises:
            ScheduleError: Something in it cannot be.
        """
        if not isinstance(value, dict):
            raise ScheduleError(f"an event: {value!r} is not possible; use a mapping")
        known = [one.name for one in dataclasses.fields(cls)]
        if unknown := [name for name in value if name not in known]:
            raise ScheduleError(
                f"an event: {unknown[0]!r} is no field of {value!r}; there are {', '.join(known)}"
            )
        if left := [name for name in ("at_s", "action", "node") if name not in value]:
            raise ScheduleError(f"an event: {left[0]} is missing in {value!r}; add it")
        fields: dict[str, Any] = {name: _plain(name, one) for name, one in value.items()}
        if "spec" in fields:
            fields["spec"] = _node(fields["node"], fields["spec"])
        return cls(**fields)


def _check_name(name: str, value: object, example: str) -> None:
    if not isinstance(value, str) or not value:
        raise ScheduleError(f"{name}: {value!r} is not possible; use {example}")


def _check_cores(name: str, value: float | None) -> None:
    try:
        NodeSpec(name="n", cores=value)  # it knows
    except SpecError as error:
        raise ScheduleError(f"{name}: {str(error).partition('cores: ')[2]}") from None


def _check_rates(where: str, egress: float | Same | None, ingress: float | Same | None) -> None:
    if egress == ingress == "same":
        raise ScheduleError(f"{where}nothing changes; give egress_bits_per_s or ingress_bits_per_s")
    for name, value in (("egress_bits_per_s", egress), ("ingress_bits_per_s", ingress)):
        if value != "same":
            check_rate(name, value)


def _check_seconds(name: str, value: object, *, least: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value < math.inf
    ):
        raise ScheduleError(f"{name}: {value!r} is not possible; use seconds, at least {least:g}")


def _plain(name: str, value: Any) -> Any:
    """A value of YAML, to which 20e6 is a text."""
    if isinstance(value, str) and value != "same" and name.endswith(("_s", "cores")):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _node(name: str, value: object) -> NodeSpec:
    """The node that an `add` describes; its name is the event's."""
    where = f"add of {name!r}: spec: "
    if not isinstance(value, dict):
        raise ScheduleError(f"{where}{value!r} is not possible; use a mapping like {{cores: 1}}")
    known = [one.name for one in dataclasses.fields(NodeSpec) if one.name != "name"]
    if unknown := [one for one in value if one not in known]:
        raise ScheduleError(f"{where}{unknown[0]!r} is no field; there are {', '.join(known)}")
    try:
        return NodeSpec(name=name, **{one: _plain(one, v) for one, v in value.items()})
    except SpecError as error:
        raise ScheduleError(f"{where}{error}") from None
