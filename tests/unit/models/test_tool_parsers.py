"""This project's parsers of model output: tool calls, reasoning, and the text around them."""

from __future__ import annotations

import importlib.util
import json
import time
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu import cpu_limit
from support.extent import examples
from support.talk import written
from support.templates import OWN, answer, call, chat_format, tool

from envserver.models.parsers import FORMATS, ParsedCall
from envserver.proxy.engine_client.parsers import AnswerParser, format_of_calls

CASES = tomllib.loads(Path(__file__).with_name("parsers.toml").read_text())
WRITERS = {
    "hermes": ("qwen2_5", "qwen3", "qwen3_vl", "qwen3_instruct_2507"),
    "functions": ("qwen3_5_think", "qwen3_6", "nemotron_3_nano"),
    "keys": ("glm4moe",),
    "llama": ("llama3_1", "llama3_2"),
    None: ("gptoss", "deepseekv3", "phi3", "gemma3", "cohere2"),
}


def test_the_format_of_a_model_is_the_one_that_reads_its_template() -> None:
    package = importlib.util.find_spec("trl")
    assert package is not None and package.submodule_search_locations, "run `make test`"
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    for name, writers in WRITERS.items():
        for writer in writers:
            source = (folder / f"{writer}.jinja").read_text()
            assert format_of_calls(chat_format(source)) == name, writer


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]{}"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS,
    lambda values: st.lists(values, max_size=2) | st.dictionaries(WORDS, values, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", ["chatml", "thinking", "llama", "mistral"])
@settings(deadline=None, max_examples=examples(240))
@given(data=st.data())
def test_what_a_model_means_is_read(name: str, data: st.DataObject) -> None:
    count = 1 if name == "llama" else data.draw(st.integers(0, 3))
    arguments = st.dictionaries(WORDS, VALUES, max_size=3)
    calls = [call(data.draw(arguments), name=f"tool_{n}") for n in range(count)]
    content = "" if (bool(calls) and name in ("llama", "mistral")) else data.draw(WORDS)
    message = answer(content, *calls)
    if name == "thinking":
        message["reasoning"] = data.draw(WORDS)
    text = written(name, message, indent=data.draw(st.sampled_from([None, 1])))
    body = {"tools": [tool()]}
    assert reader(name).trouble(body) is None
    assert as_told(reader(name).message(text, body, [1])) == as_told(message)


@cache
def reader(name: str) -> AnswerParser:
    return AnswerParser(chat_format(OWN[name]), reasons=name == "thinking")


def as_told(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    functions = [parsed_call["function"] for parsed_call in message.get("tool_calls") or []]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    texts = [(message.get(name) or "").strip() for name in ("content", "reasoning")]
    return texts[0], texts[1], calls


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES["formats"])
def test_formats(format: str, text: str, content: str, calls: list[list[str]]) -> None:
    found = FORMATS[format](text, [tool()])
    assert found is not None
    assert (found.content, found.calls) == (content, [ParsedCall(*called) for called in calls])


LONG = [["hermes", "<tool_call>" + "[" * 100_000], ["pythonic", "[f(a=" + "(" * 10_000 + ")]"]]


@pytest.mark.parametrize(("format", "text"), [*CASES["broken"], *LONG])
def test_broken_calls_are_text(format: str, text: str) -> None:
    assert FORMATS[format](text, [tool()]) is None


def test_no_text_takes_long_to_read() -> None:
    beginnings = ("", "<tool_call>", "<function=f>")
    most = cpu_limit(0.5)
    marks = ("<function=", "<parameter=", "<arg_key>", "<tool_call>", "[TOOL_CALLS]", "{", '"')
    for beginning, mark, name in product(beginnings, marks, FORMATS):
        began = time.process_time()
        FORMATS[name](beginning + mark * (100_000 // len(mark)), [tool()])
        assert time.process_time() - began < most, (name, beginning, mark)


@settings(deadline=None, max_examples=examples(240))
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(CASES["marks"]), max_size=12))
def test_no_text_breaks_a_format(format: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = FORMATS[format](text, [tool()])
    if found is not None:
        assert found.calls
        assert found.content in text
        for parsed_call in found.calls:
            assert parsed_call.name
            json.loads(parsed_call.arguments)


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("", "<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("<think>\n", "a</think>b", "a", "b"),
        ("<think>\n", "a, without an end", "a, without an end", None),
        ("", "a</think>", "a", None),
        ("<think>\n\n</think>\n\n", "b", None, "b"),
    ],
)
def test_reasoning(tail: str, text: str, reasoning: str | None, content: str | None) -> None:
    prompt_ids = chat_format(OWN["thinking"]).encode("x" * 99 + tail)
    message = reader("thinking").message(text, {}, prompt_ids)
    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_tools_that_must_not_be_called() -> None:
    text = '<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call>'
    none = reader("chatml").message(text, {"tools": [tool()], "tool_choice": "none"}, [1])
    assert none == {"role": "assistant", "content": text}
