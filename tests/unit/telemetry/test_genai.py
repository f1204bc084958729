"""Texts in spans: bounded, without secrets, and JSON whatever a model says."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver.telemetry.genai import MOST_CHARACTERS, inputs, outputs, tool_texts

SECRET = "sk-telemetry-0123456789abcdef"
TEXTS = st.one_of(
    st.text(max_size=40),
    st.builds(lambda size: f"{'x ' * size}{SECRET}{' y' * size}", st.sampled_from([0, 20_000])),
)
CALLS = st.lists(
    st.one_of(
        st.none(),
        st.builds(lambda text: {"id": "c", "function": {"name": "f", "arguments": text}}, TEXTS),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "critic"])},
        optional={
            "content": st.one_of(TEXTS, st.none(), st.just([{"type": "text", "text": "part"}])),
            "tool_calls": CALLS,
            "reasoning_content": TEXTS,
            "tool_call_id": TEXTS,
        },
    ),
    max_size=12,
)
TOOLS = st.lists(st.fixed_dictionaries({"name": TEXTS, "parameters": st.just({})}), max_size=4)


@settings(max_examples=examples(60))
@given(messages=MESSAGES, tools=TOOLS)
def test_texts_are_bounded_json_without_secrets(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    tools = [{"type": "function", "function": one} for one in tools]
    found = {**inputs(messages, tools), **outputs((one, None) for one in messages)}
    for name, text in found.items():
        assert isinstance(json.loads(text), list), name
        if name != "gen_ai.tool.definitions":  # what an environment declares
            assert SECRET not in text
        # One message alone may be longer: its texts are cut one by one.
        assert len(text) < 3 * MOST_CHARACTERS


def test_of_a_long_conversation_the_last_messages_are_kept() -> None:
    turns = [{"role": "user", "content": f"{number} {'x' * 10_000}"} for number in range(20)]
    told = json.loads(inputs(turns, [])["gen_ai.input.messages"])
    assert told[-1]["parts"][0]["content"].startswith("19 ")
    left = 20 - (len(told) - 1)
    assert told[0]["parts"][0]["content"] == f"[{left} earlier messages are left out]"
    assert told[1]["parts"][0]["content"].startswith(f"{left} ")


def test_a_secret_that_the_cut_would_halve_is_removed() -> None:
    text = f"{'x' * 4090} {SECRET} {'y' * 20_000}"
    (cut,) = {value for key, value in tool_texts("", text).items() if key.endswith("result")}
    assert "sk-" not in cut and len(cut) < 9000
