"""Images decoded as Pillow does it, and clear refusals with the image's index."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from raycloud.data.images import decode


def pixels(height: int = 24, width: int = 32) -> np.ndarray:
    ramp = np.linspace(0, 255, height * width).reshape(height, width)
    return np.stack([ramp, ramp.T.reshape(height, width), 255 - ramp], -1).astype(np.uint8)


def encoded(image: np.ndarray, kind: str, mode: str = "RGB", **options: object) -> bytes:
    sink = BytesIO()
    Image.fromarray(image).convert(mode).save(sink, kind, **options)
    return sink.getvalue()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_are_as_pillow_decodes_them(mode: str) -> None:
    data = encoded(pixels(), "JPEG", mode, quality=90)
    decoded = decode([data, data])
    assert decoded.shape == (2, 24, 32, 3)
    assert decoded.dtype == np.uint8
    assert np.abs(decoded[1].astype(int) - pillow(data)).max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_lossless_images_come_back_exactly(kind: str) -> None:
    data = encoded(pixels(), kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(decode([data])[0], pixels())


def test_gifs_palettes_and_alpha() -> None:
    for data in (encoded(pixels(), "GIF", "P"), encoded(pixels(), "PNG", "RGBA")):
        np.testing.assert_array_equal(decode([data])[0], pillow(data))


def test_images_are_resized_to_height_and_width() -> None:
    images = [
        encoded(pixels(24, 32), "JPEG"),
        encoded(pixels(10, 60), "PNG"),
        encoded(pixels(12, 16), "PNG"),
    ]
    decoded = decode(images, size=(12, 16))
    assert decoded.shape == (3, 12, 16, 3)
    np.testing.assert_array_equal(decoded[2], pixels(12, 16))


def test_images_in_mappings_and_none_at_all() -> None:
    data = encoded(pixels(), "PNG")
    np.testing.assert_array_equal(decode([{"bytes": data, "path": "a.png"}])[0], pixels())
    assert decode([], size=(4, 5)).shape == (0, 4, 5, 3)
    assert decode(np.array([data], dtype=object)).shape == (1, 24, 32, 3)


@pytest.mark.parametrize(
    "damaged",
    [
        encoded(pixels(), "JPEG")[:300],
        encoded(pixels(), "PNG")[:100],
        b"\xff\xd8\xff" + bytes(50),
        b"",
        b"text",
        None,
        {"path": "a.png"},
        encoded(pixels(), "PNG").replace(b"IDAT", b"IDAX"),
    ],
)
def test_a_damaged_image_is_named(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="image 1 cannot be decoded"):
        decode([encoded(pixels(), "JPEG"), damaged])


def test_other_sizes_are_refused() -> None:
    images = [encoded(pixels(24, 32), "PNG"), encoded(pixels(8, 9), "PNG")]
    with pytest.raises(
        ValueError, match="image 1 is of 8 x 9 pixels and those before it of 24 x 32"
    ):
        decode(images)
