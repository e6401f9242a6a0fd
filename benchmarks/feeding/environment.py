"""The environment that MosaicML Streaming runs in, made when it is first needed.

Streaming 0.13 asks for numpy < 2.2, transformers < 5, torchvision and the clients of five clouds.
Here it gets none of these: it is installed without its requirements, beside the few that it needs
to read shards from a disk, and takes all else (torch, numpy, Pillow, and raycloud's own decoder)
from the environment that the benchmark runs in. `torchvision` and `transformers` it only imports:
its data sets for particular vision and text corpora derive from them, and none is used here. In
their place stand modules that hold the five names it asks for and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REQUIREMENTS = (
    "mosaicml-streaming==0.13.0",
    "brotli",
    "catalogue",
    "cramjam",
    "python-snappy",
    "tqdm",
    "xxhash",
    "zstd",
)
STAND_INS = {
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "def to_tensor(_): raise NotImplementedError\n",
    "transformers/__init__.py": "",
    "transformers/feature_extraction_utils.py": "class BatchFeature: ...\n",
    "transformers/tokenization_utils_base.py": "class BatchEncoding: ...\n",
    "transformers/models/__init__.py": "",
    "transformers/models/auto/__init__.py": "",
    "transformers/models/auto/tokenization_auto.py": "class AutoTokenizer: ...\n",
}
_LIMIT_S = 300.0


class NotInstalledError(Exception):
    """A peer could not be installed; says why."""


def streaming_python(directory: Path) -> Path:
    """The interpreter of Streaming's environment, made below `directory` if it is not there yet.

    Raises:
        NotInstalledError: It could not be installed, or cannot be imported.
    """
    known = (*REQUIREMENTS, *STAND_INS.values(), sys.prefix, sys.version)
    name = hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
    place = directory / f"streaming-{name}"
    python = place / "bin" / "python"
    ready = place / "ready"
    if ready.exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=False, symlinks=True)
    packages = _packages(place)
    for file, text in STAND_INS.items():
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_text(text)
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install"),
            *("--quiet", "--no-deps", "--disable-pip-version-check", *REQUIREMENTS),
        ]
    )
    _run([str(python), "-W", "ignore", "-c", "import streaming"])
    ready.touch()
    return python


def _packages(place: Path) -> Path:
    variables = {"base": str(place), "platbase": str(place)}
    return Path(sysconfig.get_path("purelib", "venv", vars=variables))


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise NotInstalledError(said[-1])
