"""What never travels, known by its name or by what marks a directory."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

_HISTORY = {".git", ".hg", ".svn", ".jj", ".bzr"}
_CACHES = {
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
}
_ENVIRONMENTS = {".venv", ".conda", "node_modules", "site-packages"}
_LOGS = {"mlruns", "wandb"}
_SECRET_FOLDERS = {
    ".aws",
    ".azure",
    ".docker",
    ".gcloud",
    ".gnupg",
    ".kube",
    ".password-store",
    ".ray",
    ".ssh",
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
_LEFTOVER = "a tool's leftover"
_LEFTOVERS = ("*.pyc", "*.pyo", ".ds_store", "*.swp")
_MARKS = (
    ("pyvenv.cfg", "a virtual environment"),
    ("conda-meta", "a conda environment"),
    ("CACHEDIR.TAG", "a cache"),
)
_FOLDERS = (
    (_HISTORY, "version history"),
    (_CACHES, "a cache"),
    (_ENVIRONMENTS, "installed packages"),
    (_LOGS, "records of runs"),
    (_SECRET_FOLDERS, "credentials, by its name"),
)
_RUN = "a run"

# Reasons that nobody needs to be told of.
EXPECTED = frozenset(
    {_LEFTOVER, _RUN, *(reason for _, reason in _MARKS), *(reason for _, reason in _FOLDERS[:-1])}
)


def folder_stays(name: str, folder: Path | None = None) -> str | None:
    """Why a directory never travels; None if it may.

    Args:
        name: Its name.
        folder: Where it is, to see what marks it; None looks at the name alone.
    """
    plain = name.lower()
    for names, reason in _FOLDERS:
        if plain in names:
            return reason
    if folder is None:
        return None
    for mark, reason in _MARKS:
        if (folder / mark).exists():
            return reason
    if (folder / "job.yaml").is_file() and (folder / "events.jsonl").is_file():
        return _RUN
    return None


def file_stays(name: str) -> str | None:
    """Why a file never travels, by its name; None if it may.

    >>> file_stays(".env.production"), file_stays("train.py")
    ('a secret, by its name', None)
    """
    plain = name.lower()
    if any(fnmatchcase(plain, pattern) for pattern in _SECRET_FILES):
        return "a secret, by its name"
    if any(fnmatchcase(plain, pattern) for pattern in _LEFTOVERS):
        return _LEFTOVER
    if "\\" in name or not name.isprintable():
        return "a name that not every system can hold"
    return None
