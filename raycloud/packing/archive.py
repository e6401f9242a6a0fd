"""The archive that travels: the same files give the same bytes, on every machine."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raycloud.errors import SpecError
from raycloud.packing.contents import secret_in
from raycloud.packing.survey import Left, Survey, Travelling, survey

LARGEST_BYTES = 100 * 2**20  # before compression

_FIELD = "--working-dir"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip can hold
_NAMED = 5
_LEVEL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A packed working directory.

    Attributes:
        data: The archive.
        sha256: Of the archive.
        survey: What is in it, and what is not.
    """

    data: bytes
    sha256: str
    survey: Survey

    @property
    def size_bytes(self) -> int:
        """Of the archive."""
        return len(self.data)

    @property
    def told(self) -> tuple[Left, ...]:
        """What stays and a reader wants to know of."""
        return tuple(left for left in self.survey.left if left.told)


def pack(
    root: Path,
    *,
    needed: Iterable[Path] = (),
    also: tuple[Path, ...] = (),
    largest_bytes: int = LARGEST_BYTES,
) -> Package:
    """Pack a working directory.

    Args:
        root: The directory.
        needed: Files in it without which the job cannot start.
        also: Places in it that stay besides.
        largest_bytes: What the files may hold together, before compression.

    Raises:
        SpecError: It cannot be read, is too large, or a needed file stays.
    """
    found = survey(root, also=also)
    _check_size(found, largest_bytes)
    buffer = io.BytesIO()
    travelling, left = [], list(found.left)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        for file in found.files:
            data = _bytes_of(file)
            if (secret := secret_in(data)) is not None:
                reason = f"holds what looks like {secret[0]}, line {secret[1]}"
                left.append(Left(path=file.path, reason=reason))
                continue
            archive.writestr(_entry(file), data)
            travelling.append(file)
    packed = replace(found, files=tuple(travelling), left=tuple(sorted(left)))
    for path in needed:
        _check_needed(path, packed)
    data = buffer.getvalue()
    return Package(data=data, sha256=hashlib.sha256(data).hexdigest(), survey=packed)


def _entry(file: Travelling) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(file.path, _EPOCH)
    entry.create_system = 3  # Unix, whatever this is: the mode below is meant
    mode = 0o755 if file.executable else 0o644
    entry.external_attr = (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _bytes_of(file: Travelling) -> bytes:
    """A file's bytes, if it still is the file that was looked at.

    Raises:
        SpecError: It has changed since, or cannot be read.
    """
    try:
        # No link is followed, nor a pipe waited for, should one have taken the file's place.
        descriptor = os.open(file.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _changed(file)
            data = stream.read(file.size_bytes + 1)
    except OSError as error:
        raise SpecError(
            _FIELD,
            file.path,
            f"cannot be read: {error.strerror}",
            hint="make it readable, or name it in .raycloudignore",
        ) from error
    if len(data) != file.size_bytes:
        raise _changed(file)
    return data


def _changed(file: Travelling) -> SpecError:
    return SpecError(
        _FIELD,
        file.path,
        "changed while it was packed",
        hint="submit again, or name it in .raycloudignore",
    )


def _check_size(found: Survey, largest_bytes: int) -> None:
    total = sum(file.size_bytes for file in found.files)
    if total <= largest_bytes:
        return
    raise SpecError(
        _FIELD,
        str(found.root),
        f"holds {_mb(total)} in {len(found.files)} files, and {_mb(largest_bytes)} may travel; the "
        f"largest: {_largest(found.files)}",
        hint="name what is not needed in .raycloudignore; put data where the cluster reads it, and "
        "its place into data.path",
    )


def _largest(files: Sequence[Travelling]) -> str:
    most = sorted(files, key=lambda file: (-file.size_bytes, file.path))[:_NAMED]
    return ", ".join(f"{file.path} ({_mb(file.size_bytes)})" for file in most)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _check_needed(path: Path, packed: Survey) -> None:
    """See that a file travels.

    Raises:
        SpecError: It stays, or lies elsewhere.
    """
    place = path.absolute()
    resolved = place.parent.resolve() / place.name  # a link keeps its own name
    if not resolved.is_relative_to(packed.root):
        raise SpecError(
            _FIELD,
            str(packed.root),
            f"does not hold {place}, which the job needs",
            hint="name a directory that holds both with --working-dir",
        )
    inner = resolved.relative_to(packed.root).as_posix()
    if any(file.path == inner for file in packed.files):
        return
    reason = packed.why_left(inner) or "it is not there"
    raise SpecError(
        _FIELD,
        inner,
        f"is needed by the job and does not travel: {reason}",
        hint="take the secret out of it and read it from the environment"
        if "looks like" in reason
        else "rename it, or take it back in .raycloudignore with `!`",
    )
