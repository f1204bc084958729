"""What constrains what is sampled: the run decides, and nothing is too hard for the engine."""

from __future__ import annotations

import pytest
from support.recording_engine import (
    BACKTRACKS,
    CHAT,
    MESSAGES,
    PLAIN,
    RESPONSES,
    TEXT,
    Json,
    refused,
    send,
)

FUNCTION: Json = {"name": "add", "parameters": {"type": "object"}}
SCHEMA_FORM: Json = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
RESPONSES_FORM: Json = {"type": "json_schema", "name": "a", "schema": {}}
FORMS: dict[str, tuple[str, Json]] = {
    "response_format": (CHAT, {"response_format": SCHEMA_FORM}),
    "text's response_format": (TEXT, {"response_format": {"type": "json_object"}}),
    "strict": (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}),
    "tool_choice": (
        CHAT,
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
    "responses' text": (RESPONSES, {"text": {"format": RESPONSES_FORM}}),
    "responses' strict": (RESPONSES, {"tools": [{"type": "function", **FUNCTION, "strict": True}]}),
    "messages' output_config": (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ),
    "messages' any": (
        MESSAGES,
        {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "any"}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_may_refuse_everything_that_constrains_what_is_sampled(form: str) -> None:
    path, fields = FORMS[form]
    body = {**PLAIN[path], **fields}
    assert send(path, body)[0] == 200
    refused(path, body, "--tokens.constraints forms", constraints="none")
    assert send(path, PLAIN[path], constraints="none")[0] == 200


def enforced(schema: Json) -> list[tuple[str, Json]]:
    """Requests of three APIs whose answers the engine holds to `schema`."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "name": "add", "parameters": schema, "strict": True}
    output = {"format": {"type": "json_schema", "schema": schema}}
    return [
        (CHAT, {**PLAIN[CHAT], "response_format": form}),
        (RESPONSES, {**PLAIN[RESPONSES], "tools": [tool]}),
        (MESSAGES, {**PLAIN[MESSAGES], "output_config": output}),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": BACKTRACKS},
        {"properties": {"a": {"anyOf": [{"pattern": "^(([a-z])+.)+[A-Z]$"}]}}},
        {"patternProperties": {BACKTRACKS: {}}},
        {"pattern": "a{1,20000}"},
        {"pattern": "(a{9}){9}"},
        {"pattern": "a{9999}"},
        {"pattern": "a{1000000,}"},
        {"properties": {f"p{n}": {"pattern": "a{100}"} for n in range(11)}},
        {"type": "array", "maxItems": 10**9},
        {"enum": ["x" * 1000] * 280},
    ],
)
def test_a_schema_that_is_hard_for_the_engine_is_refused(schema: Json) -> None:
    for path, body in enforced(schema):
        status, _, asked = send(path, body)
        assert (status, asked) == (400, [])
        assert send(path, body, constraints="all")[0] == (400 if "enum" in schema else 200)


@pytest.mark.parametrize(
    "pattern",
    [r"^\d{4}-\d{2}$", r"^\(a+\)+$", "^[(a+)+]+$", "^(ab|cd)+$", "^(a+)?b*$", "^a{1,200}$"],
)
def test_an_ordinary_pattern_passes(pattern: str) -> None:
    for path, body in enforced({"type": "string", "pattern": pattern}):
        assert send(path, body)[0] == 200


def test_a_tool_that_nothing_enforces_may_have_any_schema() -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"pattern": BACKTRACKS}}}
    assert send(CHAT, {**PLAIN[CHAT], "tools": [tool]})[0] == 200
    refused(CHAT, {**PLAIN[CHAT], "tools": [tool], "tool_choice": "required"}, "parameters.pattern")


def test_a_grammar_in_another_form_is_a_raw_constraint() -> None:
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    refused(CHAT, {**PLAIN[CHAT], "response_format": tag}, "response_format.type")
