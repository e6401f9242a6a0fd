"""Images from bytes to pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

_JPEG = b"\xff\xd8\xff"
# Others that Pillow knows can make it run a program (PostScript), or are rare.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 2**25


def decode(
    images: Sequence[bytes | Mapping[str, Any]],
    *,
    size: tuple[int, int] | None = None,
    most_pixels: int = MOST_PIXELS,
) -> Pixels:
    """Decode images, of one of `FORMATS`, to RGB.

    Args:
        images: Encoded images; or mappings that hold them as `bytes`, as Hugging Face's data has.
        size: Height and width that all are resized to; None: all have the same already.
        most_pixels: The largest image that is decoded: a small file can say that it is a huge one.

    Returns:
        An array of shape (images, height, width, 3).

    Raises:
        ValueError: An image cannot be decoded, is truncated, or is of another size; with its index.
    """
    if not len(images):
        return np.zeros((0, *(size or (0, 0)), 3), np.uint8)
    out: Pixels | None = None
    for index, image in enumerate(images):
        try:
            data = image["bytes"] if isinstance(image, Mapping) else image
            pixels = _decoded(data, size, most_pixels, None if out is None else out[index])
        except MemoryError:
            raise
        except Exception as error:  # damaged images make decoders raise almost anything
            raise ValueError(f"image {index} cannot be decoded: {error}") from error
        if out is None:
            out = np.empty((len(images), *pixels.shape), np.uint8)
        if pixels.shape != out.shape[1:]:
            raise ValueError(
                f"image {index} is of {pixels.shape[0]} x {pixels.shape[1]} pixels and those "
                f"before it of {out.shape[1]} x {out.shape[2]}: give `size`"
            )
        if pixels.base is not out:
            out[index] = pixels
    assert out is not None  # noqa: S101 - there are images
    return out


def _decoded(
    data: bytes | None, size: tuple[int, int] | None, most_pixels: int, room: Pixels | None
) -> Pixels:
    """The pixels of one image, in `room` if it is a JPEG that fits there."""
    if data is None:
        raise ValueError("it is missing")
    pixels: Pixels | None = None
    if data[:3] == _JPEG:
        import simplejpeg  # type: ignore[import-untyped] # noqa: PLC0415 - not every task has images

        with suppress(ValueError):  # larger; or of four colours, which Pillow knows; or damaged
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            _check(height * width, most_pixels)
            pixels = simplejpeg.decode_jpeg(data, "RGB", buffer=room)
            if room is not None and pixels.shape == room.shape:
                return room
    from PIL import Image  # noqa: PLC0415 - not every task has images

    if pixels is None:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check(image.width * image.height, most_pixels)
            pixels = np.asarray(image.convert("RGB"))
    if size is None or pixels.shape[:2] == tuple(size):
        return pixels
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized)


def _check(pixels: int, most_pixels: int) -> None:
    if pixels > most_pixels:
        raise ValueError(
            f"it is of {pixels} pixels, more than {most_pixels}: give `most_pixels` to decode it"
        )
