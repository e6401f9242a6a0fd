"""A job and its working directory on their way to a cluster: what travels, and what must not.

What travels follows from the directory's `.gitignore` and `.rayignore`, as Ray reads them, and from
what Ray does not look for: secrets, links that lead outside, far too much. Ray is given a copy of
what was checked. Nothing here knows of Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.bounded import expanded
from raycloud.errors import SpecError
from raycloud.spec.job import TaskReference
from raycloud.spec.load import overriding_secrets, written_secrets
from raycloud.spec.mistakes import combined, mistake
from raycloud.spec.secrets import literal

if TYPE_CHECKING:
    from raycloud.spec.job import Job

LARGEST_BYTES = 100 * 2**20  # before compression
RUNS = "raycloud/runs"  # below the home directory of the node that runs the driver

_FIELD = "--working-dir"
_LONGEST_NAME = 40
_PATTERN = re.compile(r"[*?\[]")
_MOST_FILES = 50_000
_NAMED = 5
_CREDENTIALS = "credentials, by its name"
_FOLDERS = {
    **dict.fromkeys((".git", ".hg", ".svn", ".jj", ".bzr"), "version history"),
    **dict.fromkeys((".venv", ".conda", "node_modules", "site-packages"), "installed packages"),
    **dict.fromkeys(("mlruns", "wandb"), "records of runs"),
    **dict.fromkeys(
        (
            "__pycache__",
            ".cache",
            ".eggs",
            ".hypothesis",
            ".import_linter_cache",
            ".ipynb_checkpoints",
            ".mypy_cache",
            ".nox",
            ".pytest_cache",
            ".pytype",
            ".ruff_cache",
            ".tox",
        ),
        "a cache",
    ),
    **dict.fromkeys(
        (
            ".aws",
            ".azure",
            ".docker",
            ".gcloud",
            ".gnupg",
            ".kube",
            ".password-store",
            ".ray",
            ".ssh",
        ),
        _CREDENTIALS,
    ),
}
_SECRET_FILES = (
    ".env*",
    "*.env",
    "*.key",
    "*.pem",
    "*.p12",
    "*.pfx",
    "*.ppk",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".my.cnf",
    ".pypirc",
    ".npmrc",
    ".boto",
    ".s3cfg",
    ".dockercfg",
    ".git-credentials",
    ".htpasswd",
    ".vault-token",
    "auth_token",
    "credentials",
    "credentials.*",
    "*service*account*.json",
    "client_secret*",
    "application_default_credentials.json",
    "kubeconfig*",
    "secrets.y*ml",
    "secrets.json",
    "secrets.toml",
    "token.json",
)
_LEFTOVERS = ("*.pyc", "*.pyo", ".ds_store", "*.swp")
_MARKS = {
    "pyvenv.cfg": "a virtual environment",
    "conda-meta": "a conda environment",
    "CACHEDIR.TAG": "a cache",
}
_RUN, _RUNS, _DATA, _LEFTOVER = "a run", "runs", "a cache of data", "a tool's leftover"
_EXPECTED = {*_FOLDERS.values(), *_MARKS.values(), _RUN, _RUNS, _DATA, _LEFTOVER} - {_CREDENTIALS}

# The redaction of logs (`raycloud.redact`) would rather hide too much. Here a file that the job
# needs would be missing, so only shapes stand here that nothing else has.
_SECRETS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    (
        "a private key",
        re.compile(
            rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,8}-----[\s\S]{0,400}?[A-Za-z0-9+/]{40}"
        ),
    ),
    ("a PuTTY private key", re.compile(rb"PuTTY-User-Key-File-\d: \S")),
    ("an AWS access key", re.compile(rb"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])")),
    (
        "an AWS secret key",
        re.compile(
            rb"(?i:aws_?secret_?access_?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
        ),
    ),
    (
        "a GitHub token",
        re.compile(rb"(?<![A-Za-z0-9_])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40})"),
    ),
    ("a GitLab token", re.compile(rb"(?<![A-Za-z0-9_-])glpat-[A-Za-z0-9_-]{20}")),
    ("a Hugging Face token", re.compile(rb"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{30}")),
    (
        "an API key",
        re.compile(rb"(?<![A-Za-z0-9_-])sk-(?:proj-|ant-[a-z0-9]{2,8}-)?[A-Za-z0-9]{32}"),
    ),
    ("a Slack token", re.compile(rb"(?<![A-Za-z0-9_-])xox[abprs]-[0-9]{8}[A-Za-z0-9-]{10}")),
    ("a Google API key", re.compile(rb"(?<![A-Za-z0-9_-])AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])")),
    ("a PyPI token", re.compile(rb"(?<![A-Za-z0-9_-])pypi-AgE[A-Za-z0-9_-]{50}")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingDir:
    """A directory that was looked through.

    Attributes:
        root: The directory, resolved.
        sizes: The bytes of each file that travels, by its path from the root.
        left: Why a file or a directory stays, by its path; not of what the ignore files name.
    """

    root: Path
    sizes: dict[str, int]
    left: dict[str, str]

    @property
    def told(self) -> dict[str, str]:
        """What stays and a reader wants to know of: no caches and environments."""
        return {path: reason for path, reason in self.left.items() if reason not in _EXPECTED}

    def why_left(self, path: str) -> str:
        """Why a path does not travel."""
        for one in (Path(path), *Path(path).parents):
            if reason := self.left.get(one.as_posix()):
                return reason
        if (self.root / path).exists():
            return "a .gitignore or .rayignore names it, or Ray packs nothing of that name"
        return "it is not there"


Walk = Callable[[Path, Callable[[Path], bool]], Iterable[Path]]
"""Gives the files below a directory that Ray packs, passing over what a function says stays."""


def survey(
    root: Path, walk: Walk, *, also: Collection[Path] = (), largest_bytes: int = LARGEST_BYTES
) -> WorkingDir:
    """Look through a working directory; `also`: resolved places in it that stay besides.

    Raises:
        SpecError: It is no project, cannot be read, or is too large.
    """
    root = _checked(root)
    left: dict[str, str] = {}

    def stays(path: Path) -> bool:
        reason = None if path == root else _DATA if path in also else _why_it_stays(path, root)
        if reason is not None:
            left[path.relative_to(root).as_posix()] = reason
        return reason is not None

    try:
        files = {path.relative_to(root).as_posix(): path for path in walk(root, stays)}
        sizes = {name: path.stat().st_size for name, path in sorted(files.items())}
        _check_size(root, sizes, largest_bytes)
        for name, path in files.items():
            if reason := _why_its_content_stays(path, root, files):
                left[name] = reason
                del sizes[name]
    except OSError as error:
        raise _unreadable(error, root) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            _FIELD, str(root), f"an ignore file is no text: {error}", hint="write it in UTF-8"
        ) from error
    return WorkingDir(root=root, sizes=sizes, left=dict(sorted(left.items())))


@contextlib.contextmanager
def copied(found: WorkingDir) -> Iterator[Path]:
    """A copy of what travels and nothing else, each file looked through as it is copied.

    What has changed since the directory was looked through cannot slip in.

    Raises:
        SpecError: A file is gone, is another kind of file by now, or holds a secret by now.
    """
    with tempfile.TemporaryDirectory(prefix="raycloud-submit-") as folder:
        copy = Path(folder, found.root.name)
        copy.mkdir()
        for name in found.sizes:
            source, target = found.root / name, copy / name
            try:
                real = Path(os.path.realpath(source))
                inside = real.is_relative_to(found.root)
                known = inside and real.relative_to(found.root).as_posix() in found.sizes
                descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                with os.fdopen(descriptor, "rb") as file:
                    status = os.fstat(descriptor)
                    whole = known and stat.S_ISREG(status.st_mode)
                    content = file.read() if whole else b""
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                target.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
            except OSError as error:
                raise _unreadable(error, found.root) from error
            secret = secret_in(content)
            if secret is not None or not whole:
                what = "leads elsewhere" if secret is None else f"holds what looks like {secret[0]}"
                raise SpecError(
                    _FIELD,
                    name,
                    f"has changed while it was sent: it {what}",
                    hint="submit again, once nothing writes there",
                )
        yield copy


def ignored_above(root: Path) -> list[Path]:
    """Ignore files that git reads and Ray does not: those of the repository above a directory."""
    found: list[Path] = []
    for folder in (root, *root.parents):
        if folder != root and (folder / ".gitignore").is_file():
            found.append(folder / ".gitignore")
        if (folder / ".git").exists():
            return found
    return []


def secret_in(data: bytes) -> tuple[str, int] | None:
    r"""What a file holds that looks like a secret, and in which line (from 1); or None.

    >>> secret_in(b"x = 1\nkey = 'AKIA" + b"ABCDEFGHIJKLMNOP'")
    ('an AWS access key', 2)
    """
    for reason, pattern in _SECRETS:
        if found := pattern.search(data):
            return reason, data.count(b"\n", 0, found.start()) + 1
    return None


def _unreadable(error: OSError, root: Path) -> SpecError:
    hint, name = "make it readable, or name it in .rayignore", str(error.filename or root)
    return SpecError(_FIELD, name, f"cannot be read: {error.strerror}", hint=hint)


def _checked(root: Path) -> Path:
    if not root.is_dir():
        raise SpecError(_FIELD, str(root), "is no directory", hint="name the project's directory")
    root = root.resolve()
    if root in {Path(root.anchor), expanded(Path("~")).resolve()}:
        what = "is your whole home or the whole machine, not a project"
        hint = "go to the project's directory, or name it with --working-dir"
        raise SpecError(_FIELD, str(root), what, hint=hint)
    return root


def _why_it_stays(path: Path, root: Path) -> str | None:
    """Why a file or directory never travels, by its name, by what marks it, by where it leads."""
    name = path.name.lower()
    if name == ".raycloudignore":
        what = "is not read any more: Ray packs the directory"
        hint = "rename it to .rayignore, which Ray reads beside .gitignore"
        raise SpecError(_FIELD, path.relative_to(root).as_posix(), what, hint=hint)
    if "\\" in path.name or not path.name.isprintable():
        return "a name that not every system can hold"
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            return "a link that leads outside"
        if not target.is_file():
            return "a link to a directory" if target.is_dir() else "a link that leads nowhere"
    if path.is_dir():
        return _why_folder_stays(path, root)
    if any(fnmatchcase(name, pattern) for pattern in _SECRET_FILES):
        return "a secret, by its name"
    return _LEFTOVER if any(fnmatchcase(name, one) for one in _LEFTOVERS) else None


def _why_folder_stays(path: Path, root: Path) -> str | None:
    if reason := _FOLDERS.get(path.name.lower()):
        return reason
    if path == root / "runs":
        return _RUNS
    if (path / "job.yaml").is_file() and (path / "events.jsonl").is_file():
        return _RUN
    return next((why for mark, why in _MARKS.items() if (path / mark).exists()), None)


def _why_its_content_stays(path: Path, root: Path, files: Collection[str]) -> str | None:
    if path.is_symlink():  # it carries the bytes of its target, which must travel itself
        target = Path(os.path.realpath(path)).relative_to(root).as_posix()
        if target not in files:
            return "a link to what stays"
    if secret := secret_in(path.read_bytes()):
        return f"holds what looks like {secret[0]}, line {secret[1]}"
    return None


def _check_size(root: Path, sizes: dict[str, int], largest_bytes: int) -> None:
    total = sum(sizes.values())
    if len(sizes) > _MOST_FILES:
        what = f"more than {_MOST_FILES} files"
        hint = "name a smaller directory, or leave some out in .rayignore"
    elif total > largest_bytes:
        most = sorted(sizes, key=lambda name: (-sizes[name], name))[:_NAMED]
        what = (
            f"{_mib(total)} in {len(sizes)} files, and {_mib(largest_bytes)} may travel; the "
            f"largest: {', '.join(f'{name} ({_mib(sizes[name])})' for name in most)}"
        )
        hint = (
            "name what is not needed in .rayignore; put data where the cluster reads it, and its "
            "place into data.path"
        )
    else:
        return
    raise SpecError(_FIELD, str(root), f"holds {what}", hint=hint)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def working_dir_of(job_file: Path, asked: Path | None) -> Path:
    """The directory that travels: the one asked for, else the current one or the job's.

    Relative paths in a job start at the current directory, so that one comes first.
    """
    if asked is not None:
        return asked
    here = Path.cwd()
    return here if job_file.resolve().is_relative_to(here) else job_file.resolve().parent


def survey_for(job: Job, job_file: Path, root: Path, walk: Walk) -> WorkingDir:
    """Look through a working directory, and see that the job can be found in it.

    `job` is as it was loaded: relative paths as they were written, and `${NAME}` for secrets.

    Raises:
        SpecError: The job or its file holds a secret; the directory cannot travel, or what the job
            needs of it does not.
    """
    _check_secrets([*literal(job.model_dump()), *written_secrets(job_file)])
    path = job.checkpoint.path
    if path is not None and _is_relative(path):
        raise SpecError(
            "checkpoint.path",
            path,
            "would lie in the unpacked package, which Ray removes",
            hint="write a path of the cluster from its root or a URL, or leave it out: checkpoints "
            f"are then kept in ~/{RUNS} there",
        )
    cache = job.data.cache.path
    also = {(root / cache).resolve()} if cache and _is_relative(str(cache)) else set()
    found = survey(root, walk, also=also)
    task = TaskReference.parse(str(job.task)).file
    for needed in (job_file, *([task] if task else [])):
        check_travels(needed, found)
    _check_data(job, found)
    return found


def entrypoint(
    job_file: Path, root: Path, submission: str, *, overrides: Sequence[str], restarts: int
) -> str:
    """The shell command that runs a job in its unpacked package.

    Raises:
        SpecError: One of the overrides holds a secret.

    >>> entrypoint(Path("/p/a b.yaml"), Path("/p"), "x-1", overrides=["steps=5"], restarts=2)
    "raycloud train 'a b.yaml' --run-dir ~/raycloud/runs/x-1 --restarts 2 --cards --set steps=5"
    """
    _check_secrets(overriding_secrets(overrides))
    inner = (job_file.parent.resolve() / job_file.name).relative_to(root.resolve()).as_posix()
    named = inner if not inner.startswith("-") else f"./{inner}"
    settings = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    return (
        f"raycloud train {shlex.quote(named)} --run-dir {run_dir_of(submission)} "
        f"--restarts {restarts} --cards{settings}"
    )


def run_dir_of(submission: str) -> str:
    """Where the run of a submission is kept, as the shell there reads it."""
    return f"~/{RUNS}/{submission}"


def submission_id(name: str, unix_s: float, salt: str) -> str:
    """A name that sorts by time and is free: job, moment in UTC, and a few random letters.

    >>> submission_id("GPT small", 0.0, "ab12")
    'gpt-small-19700101-000000-ab12'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-") or "job"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(unix_s))}-{salt}"


def _check_secrets(found: Iterable[tuple[str, str]]) -> None:
    """Refuse a job that holds a secret itself, in these fields, given with what may be shown."""
    problem = (
        "holds a secret, which anyone could read on the cluster: in the job file that travels, or "
        "in the command that runs there"
    )
    hint = (
        "write ${NAME} in its place, and set NAME in the environment that the cluster's head is "
        "started in; if it is part of a longer text, let the task read it from there"
    )
    mistakes = [mistake(field, shown, problem, hint) for field, shown in dict(found).items()]
    if mistakes:
        raise combined(mistakes)


def check_travels(path: Path, found: WorkingDir) -> None:
    """See that a file travels that the job cannot start without."""
    place = path.absolute()
    resolved = place.parent.resolve() / place.name  # a link keeps its own name
    if not resolved.is_relative_to(found.root):
        what = f"does not hold {place}, which the job needs"
        hint = "name a directory that holds both with --working-dir"
        raise SpecError(_FIELD, str(found.root), what, hint=hint)
    inner = resolved.relative_to(found.root).as_posix()
    if inner not in found.sizes:
        reason = found.why_left(inner)
        hint = "rename it, or take it out of the ignore file"
        if "looks like" in reason:
            hint = "take the secret out of it and read it from the environment"
        what = f"is needed by the job and does not travel: {reason}"
        raise SpecError(_FIELD, inner, what, hint=hint)


def _check_data(job: Job, found: WorkingDir) -> None:
    path = job.data.path
    if path is None or not _is_relative(str(path)):
        return
    # The folder or file before what is a pattern; of `.`, and of a pattern alone, nothing.
    parts = Path(os.path.normpath(path)).parts
    inner = "/".join(itertools.takewhile(lambda part: not _PATTERN.search(part), parts))
    if not inner or any(f"{name}/".startswith(f"{inner}/") for name in found.sizes):
        return
    outside = inner.startswith("..") or not (found.root / inner).exists()
    why = "not in the working dir" if outside else found.why_left(inner)
    raise SpecError(
        "data.path",
        str(path),
        f"is a place on this machine that does not travel: {why}",
        hint="put the data where the cluster reads it, and write that path or URL",
    )


def _is_relative(location: str) -> bool:
    """Whether a location starts at the current directory."""
    if "://" in location or "::" in location:
        return False
    return not (location.startswith("~") or Path(location).is_absolute())
