"""Answers questions about a bed's Ray: runs beside its head, asked through a Unix socket.

    python -m benchmarks.testbed.gcs --address 10.77.0.10:6379 --socket /tmp/rt1a2b/gcs

Only from inside a bed's namespaces is there a way to its addresses, while a Unix socket is a file,
which all of them share. One process that stays answers in a millisecond what a new one would take
two seconds to import Ray for. A question is a line of JSON, and so is its answer.
"""

from __future__ import annotations

import argparse
import json
import socketserver
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import NodeID
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2, gcs_pb2

_NOTICE = "spot machine will be taken away"


class _Server(socketserver.UnixStreamServer):
    """Holds the way to the GCS for whoever asks next."""

    gcs: GcsClient


class _Question(socketserver.StreamRequestHandler):
    """One connection: a question, its answer."""

    server: _Server

    def handle(self) -> None:
        """Answer; what goes wrong is an answer too."""
        asked = json.loads(self.rfile.readline())
        try:
            answer = _answer(self.server.gcs, asked)
        except Exception as error:  # noqa: BLE001 - whoever asked says what comes of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _answer(gcs: GcsClient, asked: Mapping[str, Any]) -> dict[str, Any]:
    match asked["about"]:
        case "nodes":
            return {"nodes": _nodes(gcs), "draining": gcs.get_draining_nodes()}
        case "drain":
            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            accepted, why = gcs.drain_node(
                asked["node_id"], reason, _NOTICE, int(asked["deadline_ms"])
            )
            return {} if accepted else {"error": f"not accepted: {why}"}
        case other:
            return {"error": f"nothing is known about {other!r}"}


def _nodes(gcs: GcsClient) -> list[dict[str, Any]]:
    """All nodes Ray has seen."""
    return [
        {
            "id": NodeID(identity).hex() if isinstance(identity, bytes) else identity.hex(),
            "alive": node.state == gcs_pb2.GcsNodeInfo.ALIVE,
            "address": node.node_manager_address,
            "labels": dict(node.labels),
            "started_ms": node.start_time_ms,
        }
        for identity, node in gcs.get_all_node_info().items()
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Answer until ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed.gcs", description=__doc__)
    parser.add_argument("--address", required=True, help="of the head, host:port")
    parser.add_argument("--socket", type=Path, required=True, help="made here")
    given = parser.parse_args(words)
    gcs = GcsClient(address=given.address)
    gcs.get_all_node_info()  # by now it answers; the socket says so
    draft = given.socket.with_suffix(".draft")
    with _Server(str(draft), _Question) as server:
        server.gcs = gcs
        draft.rename(given.socket)  # it is bound before it listens: who finds it then is refused
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
