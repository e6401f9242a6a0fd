"""Checkpoints in a store: publish, list, load, go back over damaged ones, drop old ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from raycloud.checkpoint.manifest import LARGEST_BYTES, Manifest
from raycloud.checkpoint.naming import (
    MISSING_HINT,
    DamagedError,
    damaged,
    directory,
    is_draft,
    manifest_name,
    published_step,
    step_of,
)
from raycloud.errors import CheckpointError

if TYPE_CHECKING:
    from raycloud.checkpoint.manifest import PartRecord
    from raycloud.checkpoint.store import Store

Sizes = Mapping[str, int]
"""Bytes of the files of a store, by name."""

_READERS = 8  # parts that are read at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The newest sound checkpoint, if any; and step and reason of newer, damaged ones."""

    manifest: Manifest | None
    skipped: tuple[tuple[int, str], ...] = ()


def publish(store: Store, manifest: Manifest) -> None:
    """Make a checkpoint visible: its manifest is written last, when all parts are there.

    Raises:
        CheckpointError: The store cannot write it.
        DamagedError: A part is missing or has another size than recorded; nothing is written.
        TaskError: The state holds what a manifest cannot carry.
    """
    content = manifest.to_bytes()
    verify(store, manifest, digests=False)
    store.write(manifest_name(manifest.step), [content])


def steps(store: Store) -> list[int]:
    """Steps of the published checkpoints, sound or damaged, ascending."""
    return _published(store.sizes("step-"))


def load(store: Store, step: int, *, size: int | None = None) -> Manifest:
    """The manifest of one published checkpoint, of `size` bytes; its parts are not looked at.

    Raises:
        CheckpointError: No such checkpoint, or another version of raycloud wrote it.
        DamagedError: The manifest is not what was written.
    """
    name = manifest_name(step)
    place = f"{store.place}/{name}"
    if not size:  # a pipe has no bytes, either, and who reads it waits
        if not store.exists(name):
            there = ", ".join(map(str, steps(store))) or "none"
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {store.place}",
                hint=f"there are: {there}",
            )
        size = store.size(name)
    if size > LARGEST_BYTES:
        raise damaged(place, f"has {size} bytes, over {LARGEST_BYTES}")
    manifest = Manifest.from_bytes(store.read(name), place)
    if manifest.step != step:
        raise damaged(place, f"is the manifest of step {manifest.step}")
    return manifest


def verify(
    store: Store, manifest: Manifest, *, sizes: Sizes | None = None, digests: bool = True
) -> None:
    """Check that every part is there and what was written; without `digests`, by sizes alone.

    Raises:
        DamagedError: A part is missing, truncated or altered; names it.
    """
    if sizes is None:
        sizes = store.sizes(f"{directory(manifest.step)}/")
    _compare_sizes(store, manifest, sizes)
    if digests:
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(partial(_compare_digest, store), manifest.parts))


def _compare_digest(store: Store, part: PartRecord) -> None:
    digest = hashlib.sha256()
    for chunk in store.stream(part.file):
        digest.update(chunk)
    if digest.hexdigest() != part.sha256:
        raise damaged(f"{store.place}/{part.file}", "is not what was written: its digest differs")


def latest(store: Store, *, digests: bool = True) -> Found:
    """The newest checkpoint that is complete and as it was written.

    Goes back over damaged ones and says so in `Found.skipped`. What cannot be reached, or was
    written by a newer raycloud, is not damaged: that raises, since going back would lose work.
    Without `digests`, damage inside a part is noticed when it is loaded.

    Raises:
        CheckpointError: The store cannot be read, or the newest has another format.
    """
    skipped: list[tuple[int, str]] = []
    sizes = store.sizes("step-")
    for step in reversed(_published(sizes)):
        try:
            manifest = load(store, step, size=sizes[manifest_name(step)])
            verify(store, manifest, sizes=sizes, digests=digests)
        except DamagedError as error:
            skipped.append((step, error.message))
        else:
            return Found(manifest=manifest, skipped=tuple(skipped))
    return Found(manifest=None, skipped=tuple(skipped))


def withdraw(store: Store, newest: int) -> tuple[int, ...]:
    """Take back the checkpoints of later steps than `newest`; their steps, ascending."""
    later = tuple(step for step in steps(store) if step > newest)
    store.remove_all([manifest_name(step) for step in later])
    return later


def retain(
    store: Store,
    keep: int,
    *,
    newest: int | None = None,
    known: Mapping[int, Manifest] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Remove what is no longer needed: the manifest first, so that no half checkpoint is published.

    The newest `keep` checkpoints whose manifest and part sizes are sound stay. Everything of older
    steps goes, and so do unpublished directories and drafts of killed writers below the newest.
    Nothing at or above the newest is touched: it may be being written.

    Args:
        store: Where.
        keep: How many stay, at least 1.
        newest: The step that has just been published; None takes the newest sound one. A run that
            resumed before a damaged checkpoint passes it, so that the damaged one does not count.
        known: Manifests that need not be read, by step.

    Returns:
        Steps of the published checkpoints that were removed, ascending.
    """
    sizes = store.sizes("step-")
    published = [step for step in _published(sizes) if newest is None or step <= newest]
    sound = (s for s in reversed(published) if _sound(store, s, sizes, known.get(s)))
    kept = list(islice(sound, keep))
    if not kept:
        return ()
    removed = tuple(step for step in published if step < kept[-1])
    store.remove_all([manifest_name(step) for step in removed])
    stay = set(published) - set(removed)
    stale = [
        name
        for name in sizes.keys() - {manifest_name(step) for step in removed}
        if (of_step := step_of(name)) is not None
        and of_step < kept[0]
        and (of_step not in stay or is_draft(name))
    ]
    store.remove_all(sorted(stale))
    return removed


def _published(sizes: Sizes) -> list[int]:
    return sorted(step for name in sizes if (step := published_step(name)) is not None)


def _sound(store: Store, step: int, sizes: Sizes, known: Manifest | None) -> bool:
    try:
        manifest = known or load(store, step, size=sizes[manifest_name(step)])
        _compare_sizes(store, manifest, sizes)
    except DamagedError:
        return False
    return True


def _compare_sizes(store: Store, manifest: Manifest, sizes: Sizes) -> None:
    for part in manifest.parts:
        place, size = f"{store.place}/{part.file}", sizes.get(part.file)
        if size is None:
            raise DamagedError(f"{place} is missing", hint=MISSING_HINT)
        if size != part.bytes:
            raise damaged(place, f"has {size} bytes, not {part.bytes}")
