"""Checks of a cluster: is it reached, do its nodes answer, clocks, links, health checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycloud.doctor.finding import Check, Finding, Kind, Level, well

if TYPE_CHECKING:
    from raycloud.doctor.facts import ClusterFacts, Facts, Link

CLOCK_S = 1.0
UNNOTICED_S = 120.0
DEFAULT_S = 30.0
HASTY_S = 3.0
ROUND_TRIP_S = 0.05
SLOW_PART = 0.1

AWAY = Kind(
    name="cluster-away",
    level=Level.UNWELL,
    what="No Ray cluster answers at the address.",
    remedy="Look at `ray status` on the head; is the port that of `ray start --head` (6379), and "
    "open from here? Call the doctor on a node of the cluster: other machines cannot join it.",
)
REFUSED = Kind(
    name="cluster-refused",
    level=Level.CHANGE,
    what="The cluster does not take our token.",
    remedy="Set RAY_AUTH_MODE=token, and copy the head's token (`ray get-auth-token` there) to "
    "~/.ray/auth_token here, chmod 600.",
)
SILENT = Kind(
    name="node-silent",
    level=Level.UNWELL,
    what="A living node did not do what it was asked.",
    remedy="Look at its logs (below RAY_TMPDIR, /tmp/ray by default, session_latest/logs), and "
    "whether raycloud is installed there in the version of this machine.",
)
DEAD = Kind(
    name="node-dead",
    level=Level.NOTE,
    what="Nodes have died since the cluster was started.",
    remedy="Look whether it was meant: the head's logs, and the provider's notices for spot "
    "machines.",
)
HEALTH_SLOW = Kind(
    name="death-unnoticed",
    level=Level.CHANGE,
    what="A node that freezes or is cut off would go unnoticed for minutes.",
    remedy="Start the head with RAY_health_check_period_ms=1000, "
    "RAY_health_check_timeout_ms=2000 and RAY_health_check_failure_threshold=5 (15 s).",
)
HEALTH_DEFAULT = Kind(
    name="death-noticed-late",
    level=Level.NOTE,
    what="A node that freezes or is cut off would go unnoticed for about a minute (Ray's default).",
    remedy="Where that is too long, start the head with RAY_health_check_period_ms=1000, "
    "RAY_health_check_timeout_ms=2000 and RAY_health_check_failure_threshold=5 (15 s).",
)
HEALTH_HASTY = Kind(
    name="death-too-soon",
    level=Level.CHANGE,
    what="A node that is only busy would be taken for dead.",
    remedy="Start the head with RAY_health_check_timeout_ms=2000 or more, and "
    "RAY_health_check_failure_threshold=5.",
)
CLOCK_APART = Kind(
    name="clock-apart",
    level=Level.UNWELL,
    what="A node's clock differs from this machine's: logs do not line up, and signed requests to "
    "stores are refused.",
    remedy="Keep all clocks by NTP: `timedatectl set-ntp true`, or chrony with the provider's time "
    "server. This machine's clock may be the wrong one.",
)
LINK_BLOCKED = Kind(
    name="link-blocked",
    level=Level.UNWELL,
    what="One node cannot connect to another on a free port: members could not exchange gradients.",
    remedy="Open all TCP ports between the nodes of the cluster, in a private network; give "
    "`ray start --node-ip-address` an address that the others reach.",
)
LINK_FAR = Kind(
    name="link-far",
    level=Level.NOTE,
    what="A round trip between two nodes takes long: each exchange waits for several of them.",
    remedy="Keep the workers of a job in one zone (`resources.worker.labels`).",
)
LINK_SLOW = Kind(
    name="link-slow",
    level=Level.NOTE,
    what="A link is ten times slower than the fastest one: a ring goes at the pace of its slowest "
    "link.",
    remedy="Keep the workers of a job on nodes with links of one kind (`resources.worker.labels`).",
)


def _nodes(facts: Facts) -> Iterator[Finding]:
    cluster = facts.cluster
    if cluster is None:
        return
    where = f"cluster {cluster.address}"
    if cluster.failure:
        yield (REFUSED if cluster.refused else AWAY).at(where, cluster.failure)
        return
    for node in cluster.nodes:
        if node.silence:
            yield SILENT.at(node.name, node.silence)
    if cluster.dead:
        yield DEAD.at(where, ", ".join(cluster.dead))
    answered = sum(not node.silence for node in cluster.nodes)
    yield well("nodes", where, f"{answered} of {len(cluster.nodes)} nodes answer")


def _health(facts: Facts) -> Iterator[Finding]:
    cluster = _reached(facts)
    if cluster is None:
        return
    where, health = f"cluster {cluster.address}", cluster.health
    if health is None:
        yield well("health", where, "the settings of its head cannot be seen")
        return
    value = (
        f"frozen or cut off: {health.frozen_s:g} s, killed: {health.killed_s:g} s "
        f"({health.threshold} x {health.period_ms} ms, time-out {health.timeout_ms} ms)"
    )
    if health.frozen_s > UNNOTICED_S:
        yield HEALTH_SLOW.at(where, value)
    elif health.frozen_s < HASTY_S:
        yield HEALTH_HASTY.at(where, value)
    elif health.frozen_s > DEFAULT_S:
        yield HEALTH_DEFAULT.at(where, value)
    else:
        yield well("health", where, value)


def _clocks(facts: Facts) -> Iterator[Finding]:
    cluster = _reached(facts)
    for node in cluster.nodes if cluster else ():
        if node.silence:
            continue
        side = "ahead" if node.ahead_s >= 0 else "behind"
        value = f"{abs(node.ahead_s):.3f} s {side}, within {node.unsure_s:.3f} s"
        if abs(node.ahead_s) - node.unsure_s > CLOCK_S:
            yield CLOCK_APART.at(node.name, value)
        else:
            yield well("clocks", node.name, value)


def _links(facts: Facts) -> Iterator[Finding]:
    cluster = _reached(facts)
    links = cluster.links if cluster else ()
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=0.0)
    for link in links:
        where = f"{link.source} to {link.target}"
        if link.failure:
            yield LINK_BLOCKED.at(where, link.failure)
            continue
        value = _told(link)
        bad = list[Finding]()
        if link.round_trip_s > ROUND_TRIP_S:
            bad.append(LINK_FAR.at(where, value))
        if link.bytes_per_s is not None and link.bytes_per_s < SLOW_PART * fastest:
            bad.append(LINK_SLOW.at(where, value))
        yield from bad or [well("links", where, value)]


def _told(link: Link) -> str:
    text = f"{1000 * link.round_trip_s:.2f} ms"
    return text if link.bytes_per_s is None else f"{text}, {link.bytes_per_s / 1e6:.0f} MB/s"


def _reached(facts: Facts) -> ClusterFacts | None:
    return facts.cluster if facts.cluster and not facts.cluster.failure else None


CHECKS = (
    Check(
        name="nodes",
        asks="Is the cluster reached, and do its nodes answer?",
        kinds=(AWAY, REFUSED, SILENT, DEAD),
        look=_nodes,
    ),
    Check(
        name="health",
        asks="How long would a dead node go unnoticed?",
        kinds=(HEALTH_SLOW, HEALTH_DEFAULT, HEALTH_HASTY),
        look=_health,
    ),
    Check(
        name="clocks",
        asks="Do the nodes' clocks agree with this machine's?",
        kinds=(CLOCK_APART,),
        look=_clocks,
    ),
    Check(
        name="links",
        asks="Do nodes reach each other on any port, and with `--links`: how fast?",
        kinds=(LINK_BLOCKED, LINK_FAR, LINK_SLOW),
        look=_links,
    ),
)
