"""What the pages name is there: events, files, fields, options, exit codes, limits, variables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import click
import pytest
import typer
import yaml

from raycloud import errors
from raycloud.cli.shell import EXIT_CODES, app, error_text
from raycloud.control.settings import ControlSettings
from raycloud.events import Event
from raycloud.net import gloo, sockets
from raycloud.on_ray import attach, fleet, session
from raycloud.spec.job import Job
from raycloud.spec.rundir import KEPT, RunDirectory
from raycloud.spec.schema import fields_of, schema_of, walk
from raycloud.task import Source, Task
from tests.pages import DOCS, README, Block, blocks, pages, table, words

OPERATIONS = DOCS / "operations.md"
WRITTEN = [page for page in pages() if page.parent != DOCS / "decisions"]  # those speak of then
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def ids(page: Path) -> str:
    return page.name


def codes(text: str) -> list[str]:
    return CODE.findall(text)


# --- operations ---


def test_every_event_says_what_it_means_and_what_to_do() -> None:
    rows = table(OPERATIONS, "Events, and what to do")
    kinds = [kind.__name__ for kind in get_args(Event)]
    assert sorted(codes(row[0])[0] for row in rows) == sorted(kinds)
    assert all(len(row) == 3 and row[1] and row[2] for row in rows), rows


def test_exit_codes_are_those_of_the_commands() -> None:
    rows = {int(row[0]): row[1] for row in table(OPERATIONS, "Exit codes")}
    assert sorted(rows) == sorted(int(code) for code in re.findall(r"\b\d+\b", EXIT_CODES))
    raised = {
        2: errors.JobError("x"), 3: errors.MachineError("x"), 4: errors.InternalError("x"),
        130: KeyboardInterrupt(),
    }  # fmt: skip
    for code, error in raised.items():
        assert error_text(error, debug=False, plain=True)[1] == code


def test_what_a_run_keeps_is_told() -> None:
    named = {codes(row[0])[0].rstrip("/") for row in table(OPERATIONS, "What a run leaves")}
    run = RunDirectory(Path("run"))
    places = {name for name, value in vars(RunDirectory).items() if isinstance(value, property)}
    kept = {getattr(run, name) for name in places}
    there = {path.relative_to("run").parts[0] for path in kept if isinstance(path, Path)}
    assert there <= named  # tests/ray/test_docs_blocks.py holds the other direction


def test_limits_are_those_that_are_kept() -> None:
    limits = {row[0]: row[1] for row in table(OPERATIONS, "What ends a run")}
    fields = ControlSettings.__dataclass_fields__
    for what, seconds in {
        "not all workers find a place": fleet.PLACE_S,
        "a member is not ready": fields["spawn_s"].default,
        "the members have not met": fields["form_s"].default,
        "no word from a member": session.SILENCE_S,
        "a member does not answer, and others do": fields["late_s"].default,
        "a member's machine acknowledges nothing, and others do": fields["several_cut_s"].default,
        "a member that does not answer is kept": fields["return_s"].default,
        "a member's computing thread stands still": fields["still_s"].default,
        "a connection between members lets nothing through": sockets.HUNG_S,
        "an exchange between members breaks": fields["broken_s"].default,
    }.items():
        assert re.search(rf"\b{seconds:g} s\b", limits[what]), what
    assert fields["spawn_s"].default == 300  # said also of MemberSpawned
    assert f"{gloo._CONNECTING.seconds} s until they are" in limits["the members have not met"]


@pytest.mark.parametrize("name", ["_QUIET", "_EMBEDDED"])
def test_variables_given_to_ray_are_told(name: str) -> None:
    told_of = set(re.findall(r"^\| `([A-Z]+_?\w*=\w+)` \|", OPERATIONS.read_text(), re.MULTILINE))
    ours = {f"{variable}={value}" for variable, value in getattr(attach, name).items()}
    assert ours <= told_of
    every = {f"{variable}={value}" for variable, value in _every_variable().items()}
    assert told_of <= every


def _every_variable() -> dict[str, str]:
    return attach._QUIET | attach._EMBEDDED


# --- every page ---


def job_fields() -> set[str]:
    tree = schema_of(Job)
    below = {f"{name}.{field}" for name, node in walk(tree) for field in fields_of(node)}
    return {*fields_of(tree), *below, *(name for name, _ in walk(tree))}


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_job_field_that_is_named_exists(page: Path) -> None:
    fields = job_fields()
    sections = {name.partition(".")[0] for name in fields if "." in name}
    named = {
        code
        for code in codes(words(page))
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code) and code.partition(".")[0] in sections
    }
    named -= {name for name in named if name.endswith((".yaml", ".json", ".py"))}
    assert not named - fields


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_part_of_the_contract_that_is_named_exists(page: Path) -> None:
    for kind in (Task, Source):
        named = set(re.findall(rf"`{kind.__name__}\.(\w+)", words(page)))
        has = {*vars(kind), *getattr(kind, "__dataclass_fields__", ())}
        assert not named - has


def commands() -> dict[str, click.Command]:
    """The commands of `raycloud`, by their names; `cache ls` is one."""
    found: dict[str, click.Command] = {}

    def look(group: click.Command, name: str) -> None:
        found[name] = group
        for inner, command in getattr(group, "commands", {}).items():
            look(command, f"{name} {inner}".strip())

    look(typer.main.get_command(app), "")
    return found


def asked(page: Path) -> list[str]:
    """What a page asks `raycloud` to do, in its blocks and in its words."""
    lines = [line for block in blocks(page) if not block.language for line in block.commands]
    shown = [block.text for block in blocks(page) if block.is_transcript]
    lines += [line[2:] for text in shown for line in text.splitlines() if line.startswith("$ ")]
    lines += codes(words(page))
    return [line for line in lines if re.match(r"raycloud( [a-z-]|$)", line)]


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_command_and_option_that_is_named_exists(page: Path) -> None:
    known, wrong = commands(), []
    for line in asked(page):
        parts = [word.strip("[]().,") for word in re.split(r"[\s|=]+", line)[1:]]
        first = parts[0] if parts else ""
        names = (" ".join(parts[:2]), f"{first} run", first)  # `sweep JOB` is `sweep run JOB`
        name = next((n for n in names if n in known), "")
        options = {o for p in known[name].params for o in (*p.opts, *p.secondary_opts)}
        options |= {"--help", "--version", "--install-completion", "--show-completion"}
        wordy = name == "" and parts and not parts[0].startswith("-")
        if wordy or {p for p in parts if re.fullmatch(r"--[a-z-]+", p)} - options:
            wrong.append(line)
    assert not wrong


def every_block() -> list[Block]:
    return [block for page in WRITTEN for block in blocks(page)]


def test_every_block_of_python_and_yaml_can_be_read() -> None:
    for block in every_block():
        if block.language == "python":
            compile(block.text, block.page, "exec")
        if block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        if block.language == "diff":
            assert block.files
            for name, text in block.files.items():
                compile(text, name, "exec")


def test_no_block_of_a_shell_is_torn() -> None:
    for block in every_block():
        for line in block.commands if block.language in {"", "sh", "bash"} else []:
            if line.startswith(("raycloud ", "make ", "ray ", "pip ")):
                shlex.split(line)


def test_the_frozen_batch_norm_of_the_concepts_stays_frozen() -> None:
    import torch

    (block,) = [b for b in blocks(DOCS / "concepts.md") if "FrozenBatchNorm" in b.text]
    names = {"torch": torch}
    exec(compile(block.text, block.page, "exec"), names)
    layer = names["FrozenBatchNorm"](3)  # type: ignore[operator]
    before = layer.running_mean.clone()
    layer.train()(torch.randn(4, 3, 2, 2))
    assert torch.equal(layer.running_mean, before)


def test_readme_leads_to_the_pages() -> None:
    assert "(docs/index.md)" in README.read_text()


@pytest.mark.parametrize("page", ["operations.md", "job-reference.md"])
def test_what_a_resumed_run_must_keep_is_listed(page: str) -> None:
    text = (DOCS / page).read_text()
    said = text[text.index("Resuming") :].partition("`checkpoint.path`")[0]
    assert set(codes(said)) >= {name.removeprefix("data.") for name in KEPT}
