"""An open answer that an agent changed; what a conversation shares is hashed and prepared once.

The other changes are shown in test_history.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.templates import tool

from envserver.tokens import classify
from envserver.tokens.chain import RequestHashes, hashes
from envserver.tokens.prepare import KeptMessages, prepare

calm = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow]
)


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
    assert tuple(classify({"content": was}, {"content": now}, ended=False, tail=tail)) == expected


def test_deep_arguments_are_compared_as_text() -> None:
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


@calm
@given(st.lists(st.tuples(st.lists(st.sampled_from(MESSAGES), max_size=5), st.booleans())))
def test_messages_do_not_depend_on_those_that_were_kept(requests: list[Any]) -> None:
    kept = KeptMessages()
    for messages, parts in requests:
        assert prepare(messages, parts=parts, kept=kept) == prepare(messages, parts=parts)


def test_messages_of_another_request_are_not_taken_for_those_of_this_one() -> None:
    kept = KeptMessages()

    class Interrupted(dict[str, Any]):
        """A message during whose preparation another request's are prepared."""

        def get(self, name: str, default: Any = None) -> Any:
            kept.prepare([{"role": "user", "content": "of another request"}], True, "shown")
            return super().get(name, default)

    kept.prepare(MESSAGES[:2], True, "shown")
    messages = [*MESSAGES[:2], Interrupted(role="user", content="a")]
    assert kept.prepare(messages, True, "shown") == prepare(messages, parts=True, images="shown")
