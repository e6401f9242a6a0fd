"""The manifest of a checkpoint whose parts the members have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from raycloud import __version__
from raycloud.checkpoint import Manifest, PartRecord, decode, publish, retain
from raycloud.events import CheckpointPublished
from raycloud.spec.secrets import kept

if TYPE_CHECKING:
    from raycloud.checkpoint import Store
    from raycloud.commands import Publish
    from raycloud.on_ray.session import Session
    from raycloud.spec import Job


def manifest_of(command: Publish, job: Job, *, samples: int, ledger: Mapping[str, Any]) -> Manifest:
    """Put together what the members reported.

    Args:
        command: The parts, by member.
        job: What is asked; its secrets are left out.
        samples: Samples per epoch.
        ledger: The ledger's state with exactly the steps before the checkpoint's.
    """
    by_rank = sorted(command.parts.values(), key=lambda part: part["rank"])
    values: Mapping[str, Any] = decode(by_rank[0]["values"])
    return Manifest(
        step=command.step,
        epoch=values["epoch"],
        offset=values["offset"],
        generation=values["generation"],
        samples_per_epoch=samples,
        job=kept(job.resolved()).model_dump(mode="json"),
        values={
            **values,
            "fuses": [decode(part["values"])["fuse"] for part in by_rank],
            "random": {"seed": job.seed},
        },
        ledger=ledger,
        parts=tuple(PartRecord.parse(part["record"]) for part in by_rank),
        raycloud_version=__version__,
        torch_version=torch.__version__,
    )


def publish_manifest(manifest: Manifest, store: Store, session: Session) -> CheckpointPublished:
    """Make a checkpoint whole, and remove those that are not kept any longer."""
    clock, began_s = session.clock, session.clock.monotonic_s()
    publish(store, manifest)
    retain(store, session.job.checkpoint.keep, newest=manifest.step)
    return CheckpointPublished(
        step=manifest.step,
        path=f"{session.checkpoints}/step-{manifest.step:08d}",
        state_bytes=manifest.state_bytes,
        write_s=clock.monotonic_s() - began_s,
    )
