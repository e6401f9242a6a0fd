"""A testbed: several machines on this one, with their own addresses, speeds and links."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from benchmarks.testbed import ground, quota
from benchmarks.testbed.link import (
    CONGESTION_CONTROL,
    DEVICE,
    ROOT,
    End,
    Link,
    bring_up,
    lay,
    make_switch,
    plug,
)
from benchmarks.testbed.machine import Machine, counted
from benchmarks.testbed.shell import entering, ip, run
from benchmarks.testbed.spec import HEAD, MOST_NODES, NodeSpec, Spec, SpecError, check_free

if TYPE_CHECKING:
    from benchmarks.testbed.groups import Group

_NETWORK = "10.77.0"  # inside the namespaces only: nothing routes there
_HEAD_HOST = 10
_RELAYS = "sw-relays"  # no node's name has a hyphen
_REAPER_S = 60.0
_TUN = Path("/dev/net/tun")


class Testbed:
    """Machines of a spec, while the `with` block lasts.

    Nodes start without their CPU quota, since a start at a fifth of a core takes minutes: `limit`
    sets the quotas. What happens to the owner, the bed is removed: by the end of the block, by its
    reaper if the owner dies, by the next bed's `sweep` if both do.
    """

    __test__ = False  # no test, whatever pytest makes of the name

    def __init__(self, spec: Spec) -> None:
        """Describe it; nothing is made.

        Args:
            spec: What it is to be.
        """
        self.spec = spec
        self.id = ""
        self._mounts: quota.Mounts | None = None
        self._machines: dict[str, Machine] = {}
        self._hosts: dict[str, int] = {HEAD: _HEAD_HOST}
        self._switches: set[str] = set()
        self._relays: Group | None = None
        self._links: list[Link] = []
        self._trunks: list[Link] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Testbed:
        """Make it, after removing what beds left whose owner is dead.

        Raises:
            MissingError: There can be none here.
            ToolError: The system refuses.
        """
        delays_s = [n.delay_s for n in self.spec.nodes] + [t.delay_s for t in self.spec.trunks]
        why = ground.missing() or (_no_delays() if any(delays_s) else "")
        if why:
            raise ground.MissingError(why)
        ground.sweep()
        self.id = ground.claim().bed_id
        try:
            self._reaper = self._start_reaper()
            self._make()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it with everything in it."""
        self._close()

    @property
    def head(self) -> Machine:
        """The head: in the first node's zone, without quota, limit or delay."""
        return self[HEAD]

    @property
    def nodes(self) -> Mapping[str, Machine]:
        """Living machines without the head, by name, in the order of their making."""
        return MappingProxyType({n: m for n, m in self._machines.items() if m.alive and n != HEAD})

    def __getitem__(self, name: str) -> Machine:
        """A living machine, the head too.

        Raises:
            KeyError: There is none of that name.
        """
        machine = self._machines.get(name)
        if machine is None or not machine.alive:
            raise KeyError(f"{name!r} is no living machine; there are {HEAD}, {[*self.nodes]}")
        return machine

    @property
    def congestion_control(self) -> str:
        """What TCP on its machines goes by, as a living bed's head sees it: `cubic`, `bbr`.

        Raises:
            ToolError: The bed is not up.
        """
        namespace = ground.namespace_name(self.id, HEAD)
        return run(entering(namespace, ["cat", CONGESTION_CONTROL])).strip()

    def trunk_bytes(self) -> int:
        """What has crossed trunks since they were made, both ways together; over two counts twice.

        Raises:
            ToolError: The bed is not up.
        """
        ends = [end for link in self._trunks for end in (link.near, link.far)]
        return sum(counted(end.namespace, end.device)["tx"]["bytes"] for end in ends)

    def limit(self) -> None:
        """Set the CPU quota of each living node to that of its spec."""
        for machine in self.nodes.values():
            machine.throttle(machine.spec.cores)

    def add(self, node: NodeSpec) -> Machine:
        """Add a node. One of the name of a killed or removed one gets its address.

        Args:
            node: What it is. A zone without a switch gets one, joined to the head's.

        Raises:
            SpecError: The name is taken, or there is no further address.
            ToolError: The system refuses.
        """
        check_free(node.name)
        if node.name in self.nodes:
            raise SpecError(f"name: {node.name!r} lives; kill or remove it first, or use another")
        if node.delay_s > 0 and (why := _no_delays()):
            raise ground.MissingError(why)
        self._address(node.name)
        if node.zone not in self._switches:
            self._make_switches([node.zone])
            self._join({(self.spec.head_zone, node.zone): (None, 0.0)})
        self._make_machines([node])
        return self._machines[node.name]

    def remove(self, name: str) -> None:
        """End a node's processes, by SIGTERM and those that stay by SIGKILL, and take it away.

        Raises:
            KeyError: There is no living one of that name.
        """
        self[name].remove()

    def _make(self) -> None:
        self._mounts = quota.find()
        self._relays = self._group(_RELAYS)
        self._make_switches(self.spec.zones)
        self._join(
            {t.zones: (t.rate_bits_per_s, t.delay_s) for t in self.spec.all_trunks()},
        )
        self._make_machines([NodeSpec(name=HEAD, zone=self.spec.head_zone), *self.spec.nodes])

    def _make_switches(self, zones: Iterable[str]) -> None:
        new = [zone for zone in zones if zone not in self._switches]
        ip([f"netns add {self._switch(zone)}" for zone in new])
        for zone in new:
            make_switch(self._switch(zone))
            self._switches.add(zone)

    def _join(self, trunks: Mapping[tuple[str, str], tuple[float | None, float]]) -> None:
        """Join zones by trunks of a rate and a delay."""
        links = []
        for (near, far), (rate, delay_s) in trunks.items():
            ends = (
                End(namespace=self._switch(near), device=f"t-{far}"),
                End(namespace=self._switch(far), device=f"t-{near}"),
            )
            links.append(Link(*ends, delay_s=delay_s, rates={"out": rate, "in": rate}))
        self._lay(links)
        self._trunks += links
        for link in links:
            plug(link.near.namespace, {link.near.device: link.queues("out")})
            plug(link.far.namespace, {link.far.device: link.queues("in")})

    def _make_machines(self, specs: Sequence[NodeSpec]) -> None:
        names = {spec.name: ground.namespace_name(self.id, spec.name) for spec in specs}
        groups = {spec.name: self._group(spec.name) for spec in specs}
        ip([f"netns add {namespace}" for namespace in names.values()])
        links = {
            spec.name: Link(
                End(namespace=names[spec.name], device=DEVICE),
                End(namespace=self._switch(spec.zone), device=f"p-{spec.name}"),
                delay_s=spec.delay_s,
                rates={"out": spec.egress_bits_per_s, "in": spec.ingress_bits_per_s},
            )
            for spec in specs
        }
        self._lay([*links.values()])
        for zone in dict.fromkeys(spec.zone for spec in specs):
            here = [links[spec.name] for spec in specs if spec.zone == zone]
            plug(self._switch(zone), {link.far.device: link.queues("in") for link in here})
        for spec in specs:
            name, address = spec.name, self._address(spec.name)
            bring_up(links[name], address)
            # One that comes back stands last, as it was made last.
            self._machines.pop(name, None)
            self._machines[name] = Machine(
                spec, address, namespace=names[name], group=groups[name], link=links[name]
            )

    def _lay(self, links: Sequence[Link]) -> None:
        assert self._relays is not None  # noqa: S101 - made first
        self._links += links
        lay(links, group=self._relays, log=ground.log_file(self.id))

    def _group(self, name: str) -> Group:
        made = quota.group(ground.group_name(self.id, name), self._mounts)
        made.make()
        return made

    def _switch(self, zone: str) -> str:
        return ground.namespace_name(self.id, f"sw-{zone}")

    def _address(self, name: str) -> str:
        host = self._hosts.setdefault(name, _HEAD_HOST + len(self._hosts))
        if host > _HEAD_HOST + MOST_NODES:
            del self._hosts[name]
            raise SpecError(f"name: {name!r} is the {MOST_NODES + 1}st; use a name of before")
        return f"{_NETWORK}.{host}"

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        with ground.log_file(self.id).open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.testbed.reaper", self.id],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,  # closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def _close(self) -> None:
        """Take every step of the way out; the first error is raised once all were taken."""
        with contextlib.ExitStack() as stack:  # which takes the last one first
            for link in self._links:
                if link.relay is not None:
                    stack.push(_step(link.relay.end))
            for machine in self._machines.values():
                stack.push(_step(machine.reap))
            # If the removal fails, the reaper tries once more: before waiting for what it ends.
            stack.push(_step(self._end_reaper))
            stack.push(_step(partial(ground.remove, self.id)))

    def _end_reaper(self) -> None:
        if self._reaper is None:
            return
        pipe = self._reaper.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._reaper.wait(_REAPER_S)


def _step(take: Callable[[], None]) -> Callable[[object, BaseException | None, object], bool]:
    """A step of an exit stack, whose error does not replace that of a step before it."""

    def leave(_kind: object, before: BaseException | None, _trace: object) -> bool:
        with contextlib.suppress(*([] if before is None else [Exception])):
            take()
        return False

    return leave


def _no_delays() -> str:
    if os.access(_TUN, os.R_OK | os.W_OK):
        return ""
    return f"a delay is made by a TAP device, but there is no {_TUN}; load `tun`, or use no delay"
