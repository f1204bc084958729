"""An agent's change to an answer is classified by comparing the two messages.

What a conversation or a group shares is hashed and encoded once, with the same result.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.templates import CHATML, chat_format, tool

from envserver.tokens import classify
from envserver.tokens.chain import RequestHashes, hashes
from envserver.tokens.prepare import KeptMessages, prepare

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


def test_nothing_is_appended_behind_tool_calls_and_deep_arguments_are_compared_as_text() -> None:
    message = {"content": "So:", "tool_calls": [tool_call("call-1", {})]}
    again = message | {"content": "So: and more"}
    assert classify(message, again, ended=False).change == "edited"
    deep = {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
    assert classify(deep, deep).change == "exact"


# Hashed, prepared and encoded once

MESSAGES: list[Message] = [
    {"role": role, "content": content}
    for role in ("user", "assistant")
    for content in ("a", "b", "\ud800")
]
TOOLS: list[list[dict[str, Any]]] = [[], [tool("search")], [tool("search")]]
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(MESSAGES), max_size=5),
        st.sampled_from(TOOLS),
        st.sampled_from([{}, {"n": 1}, {"n": True}, {"n": 2**70}]),
        st.sampled_from([None, "critic"]),
    ),
    max_size=6,
)


@calm
@given(REQUESTS)
def test_hashes_do_not_depend_on_earlier_requests(requests: list[Any]) -> None:
    known = RequestHashes()
    for messages, tools, kwargs, agent in requests:
        about = {"kwargs": kwargs, "model": "m", "agent": agent}
        assert known.of(messages, tools, **about) == hashes(messages, tools, **about)


def test_a_conversation_hashes_only_its_new_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    about: dict[str, Any] = {"kwargs": {}, "model": "m", "agent": None}
    known, tools = RequestHashes(), [tool("search")]
    known.of(MESSAGES[:3], tools, **about)
    monkeypatch.setattr("envserver.tokens.chain._encode", lambda value: seen.append(value) or b"")
    known.of(MESSAGES, tools, **about)
    assert seen == MESSAGES[3:]


@calm
@given(st.lists(st.tuples(st.lists(st.sampled_from(MESSAGES), max_size=5), st.booleans())))
def test_messages_do_not_depend_on_those_that_were_kept(requests: list[Any]) -> None:
    kept = KeptMessages()
    for messages, parts in requests:
        assert prepare(messages, parts=parts, kept=kept) == prepare(messages, parts=parts)


def test_a_conversation_prepares_only_its_new_messages_and_no_others() -> None:
    kept = KeptMessages()
    before = prepare(MESSAGES[:3], parts=True, kept=kept)
    now = prepare(MESSAGES, parts=True, kept=kept)
    assert all(one is other for one, other in zip(before, now, strict=False))
    assert len(now) == len(MESSAGES)
    kept = KeptMessages()

    class Interrupted(dict[str, Any]):
        """A message during whose preparation another request's are prepared."""

        def get(self, name: str, default: Any = None) -> Any:
            kept.prepare([{"role": "user", "content": "of another request"}], True, "shown")
            return super().get(name, default)

    kept.prepare(MESSAGES[:2], True, "shown")
    messages = [*MESSAGES[:2], Interrupted(role="user", content="a")]
    assert kept.prepare(messages, True, "shown") == prepare(messages, parts=True, images="shown")


def test_a_group_encodes_its_first_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    form = chat_format(CHATML)
    first = form.tokens("What is 2 + 2?")
    monkeypatch.setattr(form.vocabulary, "encode", lambda text: pytest.fail("encoded again"))
    assert form.tokens("What is 2 + 2?") is first
