"""What holds the house together: drawing and folders, names, errors, fields, versions, lengths."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

import raycloud
from raycloud import errors
from raycloud.spec.job import Job
from tests.tiers import variants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "raycloud"
FOLDERS = ("raycloud", "jobs", "tests", "benchmarks", "docs")
TOP_SUFFIXES = {"", ".md", ".toml", ".txt", ".yaml"}
PUBLIC = (
    "Accuracy",
    "Auc",
    "Embedding",
    "Found",
    "Job",
    "Mean",
    "Metric",
    "Rows",
    "Run",
    "RunHandle",
    "Source",
    "Splits",
    "Task",
    "load_job",
    "plan",
    "sweep",
    "train",
    "trainable",
)
PURE = (
    "spec",
    "order",
    "planner",
    "control",
    "simulate",
    "bounded",
    "commands",
    "events",
    "errors",
    "clock",
    "metrics",
    "redact",
    "rows",
)
MAX_LINES = 600
MOST_SLIVERS = 15
MOST_IN_A_ROOM = 28


def house_files() -> Iterator[Path]:
    """Every file of the project; not what tools and runs leave."""
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in TOP_SUFFIXES and path.name != ".git":
            yield path
    for folder in (*FOLDERS, ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def python_files() -> list[Path]:
    return sorted(path for path in house_files() if path.suffix == ".py")


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def drawn_tree() -> list[tuple[int, str]]:
    """The README's tree as (indent, name) pairs."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tree,) = [block for block in blocks if block.startswith("raycloud/\n")]
    lines = [line for line in tree.splitlines() if re.match(r" {0,2}\S", line)]
    return [(len(line) - len(line.lstrip()), line.split()[0]) for line in lines]


def test_readme_draws_the_rooms_that_exist() -> None:
    drawn = {name for indent, name in drawn_tree() if indent == 2}
    files = {path.name for path in PACKAGE.glob("*.py")}
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert drawn == files | rooms


def test_readme_draws_the_top_folders_that_exist() -> None:
    drawn = {name for indent, name in drawn_tree() if indent == 0}
    assert drawn == {f"{name}/" for name in FOLDERS if any((ROOT / name).iterdir())}


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in house_files()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def fresh(code: str) -> str:
    """What a new Python prints for `code`."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names() -> None:
    assert tuple(sorted(raycloud.__all__)) == PUBLIC


@pytest.mark.parametrize("first", variants("raycloud.on_ray.run", "raycloud.control", "raycloud"))
def test_public_names_are_the_same_whatever_was_imported_first(first: str) -> None:
    code = (
        f"import {first}; import raycloud\n"
        "print(*[name for name in raycloud.__all__ if not callable(getattr(raycloud, name))])"
    )
    assert fresh(code) == ""


def test_every_error_is_exported_and_drawn() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.RaycloudError)
    }
    assert defined == set(errors.__all__)
    assert defined == set(re.findall(r"\b\w+Error\b", errors.__doc__ or ""))


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling(name: str) -> None:
    kind = getattr(errors, name)
    parameters = list(inspect.signature(kind).parameters.values())
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [f"some {p.name}" for p in parameters if p.name not in keyword]
    error = kind(*positional, **{name: f"some {name}" for name in keyword})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert "some hint" in str(copy)


def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and those below it."""
    yield section
    for field in section.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                yield from sections(kind)


@pytest.mark.parametrize(
    "section", dict.fromkeys(sections(Job)), ids=lambda section: section.__name__
)
def test_every_job_field_is_described(section: type[BaseModel]) -> None:
    assert section.__doc__
    bare = [name for name, field in section.model_fields.items() if not field.description]
    assert not bare


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.group(1) == raycloud.__version__ == project["version"]


def test_every_requirement_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(path.read_text() for path in sorted(ROOT.glob("constraints*.txt")))
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.M))
    assert not [entry for entry in entries if "--hash=sha256:" not in entry]
    found = re.findall(r"^([^\s#=]+)==(\S+)", text, re.M)
    pins = {canonicalize_name(name): version for name, version in found}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def imports() -> dict[str, set[str]]:
    """By file of the package, the files that it imports; also what only its types need."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del names["raycloud"]  # the public names, loaded lazily
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        taken = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        pairs = {(str(n.module), f"{n.module}.{alias.name}") for n in taken for alias in n.names}
        files = {inner if inner in names else outer for outer, inner in pairs}
        found[name] = (files & names.keys()) - {name}
    return found


def test_what_others_import_of_raycloud_is_there() -> None:
    """Also where no other test looks: a benchmark of a machine that is not here, say."""
    missing = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "raycloud"
            ):
                continue
            module = importlib.import_module(str(node.module))
            for name in (one.name for one in node.names if not hasattr(module, one.name)):
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{node.module}.{name}")
                    continue
                missing.append(f"{path.relative_to(ROOT)}: {node.module}.{name}")
    assert not missing


def test_no_files_import_each_other() -> None:
    graphlib.TopologicalSorter(imports()).prepare()


def test_slivers_stand_with_what_needs_them() -> None:
    """A small file that one other file imports belongs in that one, as a rule."""
    graph = imports()
    importers = Counter(one for name, taken in graph.items() for one in taken - {name})
    lines = {
        name: len((ROOT / name.replace(".", "/")).with_suffix(".py").read_text().splitlines())
        for name in graph
        if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    }
    slivers = [name for name, many in lines.items() if many < 120 and importers[name] == 1]
    assert len(slivers) <= MOST_SLIVERS, slivers


def test_no_room_is_crowded() -> None:
    rooms = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert max(rooms.values()) <= MOST_IN_A_ROOM


def test_no_file_outgrows_one_idea() -> None:
    long = [path for path in python_files() if len(path.read_text().splitlines()) > MAX_LINES]
    assert not relative(long)


def test_what_decides_imports_without_ray_and_torch() -> None:
    names = []
    for name in PURE:
        names.append(f"raycloud.{name}")
        room = importlib.import_module(names[-1])
        if hasattr(room, "__path__"):
            names += [found.name for found in pkgutil.walk_packages(room.__path__, f"{names[-1]}.")]
    code = f"import sys, {', '.join(names)}; print(*sorted({{'ray', 'torch'}} & set(sys.modules)))"
    assert fresh(code) == ""


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        pytest.param(rb"\b(TO" rb"DO|FIX" rb"ME|XX" rb"X)\b", (), id="work put off"),
        pytest.param(rb"/(ro" rb"ot|ho" rb"me)/", (), id="a path of one machine"),
        pytest.param(rb"\bsha" rb"red/", ("tests", "benchmarks"), id="data beside the project"),
    ],
)
def test_no_file_mentions(pattern: bytes, allowed: tuple[str, ...]) -> None:
    found = [
        path
        for path in house_files()
        if path.relative_to(ROOT).parts[0] not in allowed and re.search(pattern, path.read_bytes())
    ]
    assert not relative(found)
