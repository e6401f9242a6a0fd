"""Images that are small as files and large as pixels, or no images at all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from raycloud.data import images
from tests.hostile.data import image_of
from tests.hostile.jobs import Payload
from tests.hostile_forks import Case

_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n%%EOF\n"


def _jpeg(size: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size)).save(out, "JPEG")
    return out.getvalue()


def _larger(content: bytes) -> bytes:
    """The same JPEG, which says that it is of 65,500 x 65,500 pixels."""
    at = content.index(b"\xff\xc0") + 5
    return content[:at] + (65_500).to_bytes(2, "big") * 2 + content[at + 4 :]


def _case(content: Callable[[], bytes]) -> Case:
    def make(folder: Path) -> None:
        (folder / "a").write_bytes(content())

    def act(folder: Path) -> None:
        images.decode([(folder / "a").read_bytes()])

    return Case(make=make, open=act, error=ValueError, says="image 0 cannot be decoded")


CASES = {
    "a PNG of 169 million pixels": _case(lambda: image_of(13_000)),
    "a PNG of 400 million pixels": _case(lambda: image_of(20_000)),
    "a JPEG that says it is larger": _case(lambda: _larger(_jpeg(16))),
    "a JPEG cut short": _case(lambda: _jpeg(64)[:300]),
    "a PNG cut short": _case(lambda: image_of(64)[:60]),
    "PostScript, which a program would run": _case(lambda: _EPS),
    "a pickle": _case(lambda: pickle.dumps(Payload())),
    "nothing": _case(lambda: b""),
}
