"""All contestants, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.racing.alone import Limit
from benchmarks.racing.hivemind_contestants import Hivemind
from benchmarks.racing.ray_contestants import RayTrain, RayTrainTorchft
from benchmarks.racing.raycloud_contestants import Raycloud
from benchmarks.racing.torch_contestants import Torchrun
from benchmarks.racing.torchft_contestants import Torchft

if TYPE_CHECKING:
    from benchmarks.racing.contestant import Contestant

# A seventh of the some 200 updates of a race comes before the first round, as `auto` has it.
ROUNDS = {"codec": "int4", "period": 16, "outer": "nesterov", "warm_steps": 28}
AUTO = {"codec": "auto", "period": "auto", "topology": "auto", "warm_steps": 28}
SERVERS = {"topology": "servers", "staleness": 0}
SSP = {"topology": "servers", "staleness": 3, "codec": "int4", "period": 8}
ASYNCHRONOUS = {"topology": "servers", "staleness": "unbounded", "codec": "int4", "period": 8}

CONTESTANTS: Mapping[str, Contestant] = {
    one.name: one
    for one in (
        Limit(),
        Raycloud("raycloud"),
        Raycloud("raycloud-equal", shares="equal"),
        Raycloud("raycloud-int4", sync={"codec": "int4"}),
        Raycloud("raycloud-tree", sync={"codec": "int4", "topology": "tree"}),
        Raycloud("raycloud-rounds", sync=ROUNDS),
        Raycloud("raycloud-tree-rounds", sync={**ROUNDS, "topology": "tree", "warm_steps": 0}),
        Raycloud("raycloud-streamed", sync={**ROUNDS, "stream": 4}),
        Raycloud("raycloud-auto", sync=AUTO),
        Raycloud("raycloud-servers", sync=SERVERS, servers=4),
        Raycloud("raycloud-servers-int4", sync={**SERVERS, "codec": "int4"}, servers=4),
        Raycloud("raycloud-ssp", sync=SSP, servers=1),
        Raycloud("raycloud-asynchronous", sync=ASYNCHRONOUS, servers=1),
        RayTrain("ray-train", elastic=False),
        RayTrain("ray-train-elastic", elastic=True),
        RayTrainTorchft("ray-train-torchft"),
        Torchrun("torchrun", hook="none"),
        Torchrun("torchrun-fp16", hook="fp16"),
        Torchrun("torchrun-powersgd", hook="powersgd"),
        Torchft("torchft", script="torchft_ddp"),
        Torchft("torchft-diloco", script="torchft_diloco"),
        Hivemind(),
    )
}
# Their workers note their own samples of an update, to be summed over the nodes; those of the
# others note what all participants gave to it.
SUMMED = frozenset({"limit", "hivemind"})
