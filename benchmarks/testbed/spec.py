"""What a testbed is to be: nodes with their limits, and the trunks between zones."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

Direction = Literal["both", "in", "out"]  # of a link, as seen from the node

HEAD = "head"
HEAD_ZONE = "a"  # where there are no nodes to say it
MOST_NODES = 200  # as many addresses as there are for them
_LEAST_CORES = 0.1
_LEAST_BITS_PER_S = 64_000.0
_MOST_DELAY_S = 10.0
_NAME = re.compile(r"[a-z][a-z0-9]{0,5}")
_ZONE = re.compile(r"[a-z][a-z0-9]{0,3}")


class SpecError(Exception):
    """A value in a spec that cannot be; names the field, the value and the remedy."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node.

    Attributes:
        name: A lower-case letter and up to five further letters or digits.
        cores: CPU quota in cores; None: as much as there is.
        egress_bits_per_s: Most bits per second it sends; None: no limit.
        ingress_bits_per_s: Most bits per second it receives; None: no limit.
        delay_s: Seconds added one way, in each direction, between the node and its switch.
        zone: A lower-case letter and up to three further letters or digits; each zone has a switch
            of its own.
        spot: Whether it may be taken away with notice.
        labels: Further labels that it gets on Ray.
    """

    name: str
    cores: float | None = None
    egress_bits_per_s: float | None = None
    ingress_bits_per_s: float | None = None
    delay_s: float = 0.0
    zone: str = "a"
    spot: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            SpecError: One cannot be.
        """
        if not _is_text(self.name, _NAME):
            raise SpecError(
                f"name: {self.name!r} is not possible; use a lower-case letter and up to five "
                "letters or digits"
            )
        where = f"node {self.name}: "
        if self.cores is not None:
            _check_number(
                f"{where}cores", self.cores, _LEAST_CORES, math.inf, "0.4 is two fifths of a core"
            )
        for name in ("egress_bits_per_s", "ingress_bits_per_s"):
            check_rate(f"{where}{name}", getattr(self, name))
        _check_delay(f"{where}delay_s", self.delay_s)
        _check_zone(f"{where}zone", self.zone)
        if not isinstance(self.spot, bool):
            raise SpecError(f"{where}spot: {self.spot!r} is not possible; use true or false")
        if not isinstance(self.labels, Mapping) or not all(
            isinstance(text, str) for pair in self.labels.items() for text in pair
        ):
            raise SpecError(f"{where}labels: {self.labels!r}; use a mapping of text to text")


@dataclass(frozen=True, kw_only=True)
class TrunkSpec:
    """The link between the switches of two zones.

    Attributes:
        zones: The two.
        rate_bits_per_s: Most bits per second in each direction; None: no limit.
        delay_s: Seconds added one way, in each direction.
    """

    zones: tuple[str, str]
    rate_bits_per_s: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            SpecError: One cannot be.
        """
        if len(self.zones) != 2 or self.zones[0] == self.zones[1]:
            raise SpecError(f"trunk: zones: {self.zones!r} is not possible; name two zones")
        where = f"trunk {'-'.join(map(str, self.zones))}: "
        for zone in self.zones:
            _check_zone(f"{where}zones", zone)
        check_rate(f"{where}rate_bits_per_s", self.rate_bits_per_s)
        _check_delay(f"{where}delay_s", self.delay_s)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole testbed. The head comes by itself, in the zone of the first node.

    Attributes:
        nodes: In the order of their addresses.
        trunks: Between zones. Zones in none of them are joined to the head's without limit.
    """

    nodes: tuple[NodeSpec, ...]
    trunks: tuple[TrunkSpec, ...] = ()

    def __post_init__(self) -> None:
        """Check that names differ and that there is one way between any two zones.

        Raises:
            SpecError: It is not so.
        """
        names = [node.name for node in self.nodes]
        for name in names:
            check_free(name)
            if names.count(name) > 1:
                raise SpecError(f"nodes: name: {name!r} twice; give each node its own name")
        if len(names) > MOST_NODES:
            raise SpecError(f"nodes: {len(names)} of them; use at most {MOST_NODES}")
        _check_tree(self.head_zone, [trunk.zones for trunk in self.all_trunks()])

    @property
    def head_zone(self) -> str:
        """The zone that the head stands in."""
        return self.nodes[0].zone if self.nodes else HEAD_ZONE

    @property
    def zones(self) -> tuple[str, ...]:
        """All zones, the head's first."""
        named = [node.zone for node in self.nodes] + [z for t in self.trunks for z in t.zones]
        return tuple(dict.fromkeys([self.head_zone, *named]))

    def all_trunks(self) -> tuple[TrunkSpec, ...]:
        """The trunks, with those of zones that none names."""
        named = {zone for trunk in self.trunks for zone in trunk.zones}
        free = [zone for zone in self.zones if zone not in named | {self.head_zone}]
        return (*self.trunks, *(TrunkSpec(zones=(self.head_zone, zone)) for zone in free))

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read a YAML file: `{nodes: [...], trunks: [...]}` with the fields of this module.

        Args:
            path: The file.

        Raises:
            SpecError: It cannot be read, or something in it cannot be; names the file.
        """
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise SpecError(f"{path}: cannot be read: {error}") from error
        try:
            fields = _fields(Spec, content, "the file")
            nodes = _items(fields.get("nodes"), "nodes")
            trunks = _items(fields.get("trunks", []), "trunks")
            return cls(
                nodes=tuple(NodeSpec(**_fields(NodeSpec, n, "a node")) for n in nodes),
                trunks=tuple(TrunkSpec(**_fields(TrunkSpec, t, "a trunk")) for t in trunks),
            )
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None


def check_free(name: str) -> None:
    """Check that a node may have a name.

    Raises:
        SpecError: It is the head's.
    """
    if name == HEAD:
        raise SpecError(f"name: {name!r} is the head's, which every bed has; use another")


def check_rate(name: str, value: float | None) -> None:
    """Check a rate.

    Args:
        name: The field's, for the error.
        value: Bits per second; None: no limit.

    Raises:
        SpecError: It cannot be.
    """
    if value is not None:
        _check_number(name, value, _LEAST_BITS_PER_S, 1e12, "20 Mbit/s are 20_000_000")


def _check_delay(name: str, value: float) -> None:
    _check_number(name, value, 0.0, _MOST_DELAY_S, "40 ms are 0.04")


def _check_number(name: str, value: float, least: float, most: float, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        span = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise SpecError(f"{name}: {value!r} is not possible; use a number {span} ({example})")


def _check_zone(name: str, value: str) -> None:
    if not _is_text(value, _ZONE):
        raise SpecError(
            f"{name}: {value!r} is not possible; use a lower-case letter and up to three letters "
            "or digits"
        )


def _is_text(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _check_tree(root: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Check that every zone is reached from the root in exactly one way.

    Frames that can go in a circle do so for ever: the switches know no better.
    """
    reached, left = {root}, list(pairs)
    while joining := [pair for pair in left if reached & set(pair)]:
        pair = joining[0]
        if set(pair) <= reached:
            raise SpecError(
                f"trunks: {pair[0]}-{pair[1]} closes a circle; leave one trunk between any zones"
            )
        reached |= set(pair)
        left.remove(pair)
    if left:
        raise SpecError(
            f"trunks: {left[0][0]}-{left[0][1]} is not joined to zone {root} of the head; add a "
            "trunk that does"
        )


def _items(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise SpecError(f"{name}: {value!r} is not possible; use a list")
    return value


def _fields(kind: type[Any], value: object, what: str) -> dict[str, Any]:
    """The fields of a mapping of a file, which names no others than `kind` has."""
    if not isinstance(value, dict):
        raise SpecError(f"{what}: {value!r} is not possible; use a mapping")
    known = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := [name for name in value if name not in known]:
        raise SpecError(f"{what}: {unknown[0]!r} is no field; there are {', '.join(known)}")
    for name, one in known.items():
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise SpecError(f"{what}: {name} is missing in {value!r}; add it")
    return {name: _plain(name, one) for name, one in value.items()}


def _plain(name: str, value: Any) -> Any:
    """A value of YAML, to which 20e6 is a text and a pair a list."""
    if name == "zones" and isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and name.endswith(("_per_s", "delay_s", "cores")):
        try:
            return float(value)
        except ValueError:
            return value
    return value
