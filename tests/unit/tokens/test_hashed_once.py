"""What a conversation or a group shares is hashed and encoded once, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.templates import CHATML, chat_format, tool

from envserver.tokens.chain import RequestHashes, hashes
from envserver.tokens.prepare import KeptMessages, prepare

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


@given(REQUESTS)
@settings(max_examples=examples(60))
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


@given(st.lists(st.tuples(st.lists(st.sampled_from(MESSAGES), max_size=5), st.booleans())))
@settings(max_examples=examples(60))
def test_messages_do_not_depend_on_those_that_were_kept(requests: list[Any]) -> None:
    kept = KeptMessages()
    for messages, parts in requests:
        assert prepare(messages, parts=parts, kept=kept) == prepare(messages, parts=parts)


def test_a_conversation_prepares_only_its_new_messages() -> None:
    kept = KeptMessages()
    before = prepare(MESSAGES[:3], parts=True, kept=kept)
    now = prepare(MESSAGES, parts=True, kept=kept)
    assert all(one is other for one, other in zip(before, now, strict=False))
    assert len(now) == len(MESSAGES)


def test_requests_at_the_same_time_do_not_mix_their_messages() -> None:
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
