"""The job reference and the schema say what the spec says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.job_reference import example, render
from raycloud.errors import SpecError
from raycloud.spec import Job, SpecErrors
from raycloud.spec.load import LARGEST_FILE_BYTES
from raycloud.spec.rules import RULES
from raycloud.spec.schema import accepts, choices, fields_of, render_schema, schema_of, walk
from raycloud.spec.yaml_text import parse

DOCS = Path(__file__).parents[2] / "docs"
FIELDS = dict(walk(schema_of(Job)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("job-reference.md", render()), ("job.schema.json", render_schema(Job))],
)
def test_published_pages_are_up_to_date(name: str, text: str) -> None:
    assert (DOCS / name).read_text("utf-8") == text, "run `make format`"


def test_the_example_is_the_job_with_every_default() -> None:
    job = Job.model_validate(parse(example()).value)
    assert job.model_copy(update={"task": "gpt.py:Gpt"}) == Job(task="gpt.py:Gpt", steps=1000)


def test_the_example_names_every_field() -> None:
    assert set(parse(example()).lines) == set(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_in_the_reference(field: str) -> None:
    assert f"| `{field}` | {accepts(FIELDS[field])} |" in render()
    assert FIELDS[field]["description"].endswith(".")


def test_every_rule_is_in_the_reference() -> None:
    text = render()
    assert all(rule.meaning in text for rule in RULES)
    assert all(set(rule.fields) <= set(FIELDS) for rule in RULES)


def test_the_schema_has_what_others_rely_on() -> None:
    schema = json.loads(render_schema(Job))
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["required"] == ["task"]
    assert schema["additionalProperties"] is False
    assert choices(FIELDS["sync.topology"]) == ("ring", "direct", "tree", "servers", "auto")
    assert choices(FIELDS["elastic.shares"]) == ("auto", "equal")
    assert "$ref" not in json.dumps(schema)
    for name in (
        "steps",
        "seed",
        "global_batch",
        "micro_batch",
        "elastic.min_workers",
        "elastic.max_workers",
        "sync.period",
        "sync.staleness",
        "sync.codec",
        "checkpoint.every_steps",
        "checkpoint.path",
        "data.path",
    ):
        assert name in FIELDS


LEAVES = [name for name, node in FIELDS.items() if not fields_of(node) and name != "settings"]


def mistakes(mapping: dict[str, object]) -> list[SpecError]:
    """Every mistake in a mapping, each with its own hint."""
    try:
        Job.model_validate(mapping)
    except SpecErrors as error:
        return list(error.all)
    except SpecError as error:
        return [error]
    return []


@given(
    st.sampled_from(LEAVES),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([1]),
)
def test_every_value_is_taken_or_refused_with_a_remedy(field: str, value: object) -> None:
    mapping: dict[str, object] = {"task": "gpt:Gpt", "steps": 10}
    *sections, name = field.split(".")
    inner = mapping
    for section in sections:
        inner[section] = inner = {}
    inner[name] = value
    for mistake in mistakes(mapping):
        assert mistake.field in FIELDS
        assert mistake.problem
        assert mistake.hint


def test_the_largest_job_file_is_told() -> None:
    text = " ".join(render().split())
    assert f"files above {LARGEST_FILE_BYTES // 2**10} KiB are refused" in text
