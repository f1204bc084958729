"""An agent's change to an answer is classified by comparing the two messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver.tokens import classify
from envserver.tokens.chain import hashes

calm = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow]
)
words = st.text(st.sampled_from("abé<>{}:"), min_size=1, max_size=4)
contents = st.lists(words, min_size=1, max_size=5).map(" ".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(words, values, max_size=3)


@st.composite
def answers(draw: st.DrawFn, *, calls: bool | None = None) -> Message:
    """As an engine returns them, with the fields that are there and hold nothing."""
    message: Message = {"role": "assistant", "content": draw(contents), "refusal": None}
    if draw(st.booleans()) if calls is None else calls:
        called = draw(st.lists(arguments, min_size=1, max_size=2))
        message["content"] = draw(contents | st.none())
        message["tool_calls"] = [tool_call(f"call-{i}", held) for i, held in enumerate(called)]
    if draw(st.booleans()):
        message["reasoning"] = draw(contents)
    return message


def tool_call(name: str, held: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps(held)}
    return {"id": name, "type": "function", "function": function}


@calm
@given(answers(), st.data())
def test_forms_that_say_the_same_are_exact(message: Message, data: st.DataObject) -> None:
    again = {name: value for name, value in message.items() if value is not None}
    if data.draw(st.booleans()):
        again.pop("reasoning", None)
    if data.draw(st.booleans()):
        again["content"] = [{"type": "text", "text": message["content"] or ""}]
    if data.draw(st.booleans()):
        for call in again.get("tool_calls", []):
            held = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(held, indent=2, ensure_ascii=False)
    assert classify(message, again).change == "exact"
    base = {"kwargs": {}, "model": "m", "agent": None}
    assert hashes([message], [], **base) == hashes([again], [], **base)


@calm
@given(answers(calls=False), st.data())
def test_other_whitespace_is_whitespace(message: Message, data: st.DataObject) -> None:
    blanks = st.sampled_from([" ", "\n", " \n ", "\t"])
    spaced = [data.draw(blanks) + word for word in message["content"].split()]
    again = message | {"content": "".join(spaced) + data.draw(blanks)}
    assert classify(message, again).change == "whitespace"
    assert classify(message, again, ended=False).change == "whitespace"


@calm
@given(answers(calls=True), st.data())
def test_calls_written_otherwise_are_calls(message: Message, data: st.DataObject) -> None:
    again = json.loads(json.dumps(message))
    if data.draw(st.booleans()):
        again["tool_calls"][0]["id"] = "other"
    else:
        held = {**json.loads(again["tool_calls"][0]["function"]["arguments"]), "one": 1, "two": 2}
        message["tool_calls"][0]["function"]["arguments"] = json.dumps(held)
        turned = dict(reversed(held.items()))
        again["tool_calls"][0]["function"]["arguments"] = json.dumps(turned)
    assert classify(message, again).change == "calls"
    again["tool_calls"].append(tool_call("more", {}))
    assert classify(message, again).change == "edited"


@calm
@given(answers(calls=False), contents, st.sampled_from(["", "</code>", "</code>\n"]), st.booleans())
def test_text_behind_an_open_answer_is_appended(
    message: Message, extra: str, tail: str, strips: bool
) -> None:
    content = message["content"] + "\n"
    again = message | {"content": (content.strip() if strips else content) + tail + extra}
    message = message | {"content": content}
    assert classify(message, again, ended=False, tail=tail) == ("appended", extra)
    assert classify(message, again, ended=True, tail=tail).change == "edited"


@calm
@given(answers(), contents)
def test_other_words_are_an_edit(message: Message, other: str) -> None:
    before = message["content"] or ""
    assume(other.split() != before.split())
    assert classify(message, message | {"content": other}).change == "edited"
    if "tool_calls" in message:
        assert classify(message, message | {"tool_calls": []}).change == "edited"


@pytest.mark.parametrize(
    ("was", "tail", "now", "expected"),
    [
        # The stop string of which only a part of the sampled tokens' text comes back.
        ("x = 1\n", "</code>;", "x = 1\n</code>", ("appended", "")),
        # Something else than what was sampled stands where the stop string stood.
        ("x = 1\n", "</code>", "x = 1\n</end>", ("edited", "")),
        ("I think", "", "I thing it over", ("edited", "")),
        ("one two", "", "onetwo", ("edited", "")),
        # Only reasoning was sampled: what the agent writes in its place is its own.
        ("", "", "an answer", ("edited", "")),
        ("", "Observation:", "Observation: 4", ("appended", " 4")),
    ],
)
def test_open_answers(was: str, tail: str, now: str, expected: tuple[str, str]) -> None:
    got = classify({"content": was}, {"content": now}, ended=False, tail=tail)
    assert tuple(got) == expected


def test_nothing_is_appended_behind_tool_calls() -> None:
    message = {"content": "So:", "tool_calls": [tool_call("call-1", {})]}
    again = message | {"content": "So: and more"}
    assert classify(message, again, ended=False).change == "edited"


def test_deep_arguments_that_are_no_json_are_compared_as_text() -> None:
    deep = {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
    assert classify(deep, deep).change == "exact"
