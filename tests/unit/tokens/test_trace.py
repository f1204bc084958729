"""A trace gives back the calls it was made from, in every field, and stores only what is new."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from envserver_records.errors import TokensError
from envserver_records.experts import RoutedExperts
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Delivered, Dialect, Edge, TracedCall, pack, unpack
from envserver_records.sampling import LogprobsKind
from envserver_records.timings import HookEvent
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.cases import cases_of
from support.forests import answers, calm, conversations, forests

from envserver.tokens.builder import find_parents
from envserver.tokens.trace import pack_calls, unpack_calls

CASES = cases_of(__file__)

text = st.text("ab\n", max_size=3)
# Values that Python takes for each other, keys in any order.
plain = st.one_of(st.none(), st.booleans(), st.integers(0, 1), st.sampled_from([0.0, 1.0]), text)
messages = st.dictionaries(st.sampled_from(["role", "content"]), plain)

# How each field of a call is drawn, where `forests` does not say it.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "finish_reason": text,
    "message": messages,
    "messages": st.lists(messages, max_size=4),
    "tools": st.lists(messages, max_size=2),
    "sampling": messages,
    "choice": st.integers(0, 3),
    "stop_reason": st.one_of(st.none(), st.integers(0, 9), text),
    "eot_sampled": st.booleans(),
    "dialect": st.sampled_from(get_args(Dialect)),
    "streamed": st.booleans(),
    "delivered": st.sampled_from(get_args(Delivered)),
    "replayed": st.booleans(),
    "trained": st.booleans(),
    "body_digest": st.binary(max_size=16),
    "planned_parent": st.one_of(st.none(), st.integers(0, 9)),
    "edge": st.sampled_from(get_args(Edge)),
    "refusal": st.one_of(st.none(), text),
    "served_model": text,
    "told_tokens": st.tuples(st.integers(0, 9), st.integers(0, 9)),
    "started_at": st.floats(0, 2e9),
    "seconds": st.floats(0, 9),
    "seconds_to_first": st.one_of(st.none(), st.floats(0, 9)),
    "flags": st.lists(text, max_size=2),
    "logprobs_kind": st.sampled_from(get_args(LogprobsKind)),
    "sampled_message": st.one_of(st.none(), messages),
    "hooks": st.lists(st.builds(HookEvent, at=st.just("answer"), reason=text), max_size=2),
    "images": st.just([ImageSpan("00", 0, 1, (1, 2, 2))]),
    "experts": st.just(RoutedExperts(2, 1, 2, np.array([300, 1], np.uint16))),
}
OF_FORESTS = {
    "agent",
    "index",
    "model",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "versions",
    "exact",
}


@st.composite
def talks(draw: st.DrawFn) -> list[Call]:
    """Forests whose calls say something in every field; some go on from what was said before."""
    calls: list[Call] = []
    for each in draw(forests(6)):
        values = {name: draw(field) for name, field in FIELDS.items()}
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            values["tools"] = earlier.tools
            values["messages"] = [*earlier.messages, earlier.message, *values["messages"]]
        calls.append(replace(each, **values))
    return calls


def test_every_field_of_a_call_is_drawn() -> None:
    assert FIELDS.keys() | OF_FORESTS == set(Call.__struct_fields__)


@calm
@given(talks(), st.data())
def test_a_trace_gives_the_calls_back(calls: list[Call], data: st.DataObject) -> None:
    right = find_parents(calls)
    for parents in (right, [data.draw(st.integers(-1, k - 1)) for k in range(len(calls))]):
        traced = unpack(pack(pack_calls(calls, parents)), list[TracedCall])
        assert pack(unpack_calls(traced)) == pack(calls)


def with_talk(calls: list[Call]) -> list[Call]:
    """Each call's messages as an agent sends them: all before, the answer with a field more."""
    parents = find_parents(calls)
    tools = [{"name": f"tool{number}", "description": "x" * 200} for number in range(10)]
    said: list[Call] = []
    for each, parent in zip(calls, parents, strict=True):
        ask = {"role": "user", "content": f"{len(each.prompt_ids)} " + "word " * 20}
        before: list[dict[str, Any]] = []
        if parent >= 0:
            before = [*said[parent].messages, said[parent].message | {"refusal": None}]
        answer = {"role": "assistant", "content": f"answer {each.index} " + "word " * 20}
        said.append(replace(each, messages=[*before, ask], message=answer, tools=tools))
    return said


KINDS: dict[str, Callable[[int], list[Call]]] = {
    "conversation": lambda calls: conversations(calls, 50 * calls),
    "different ends": lambda calls: answers(calls, 5 * calls, ends=20),
}


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_grows_with_what_is_new(kind: str, has_ids: bool) -> None:
    sizes = []
    for count in (20, 200):
        calls = with_talk(KINDS[kind](count))
        if not has_ids:
            calls = [replace(call, prompt_ids=call.prompt_ids[:0]) for call in calls]
        sizes.append(len(pack(pack_calls(calls, find_parents(calls)))))
    # Ten times the calls, each with as much that is new.
    assert sizes[1] < 12 * sizes[0]
    assert sizes[1] < len(pack(calls)) / 5


def test_tracing_leaves_calls_as_they_are_and_a_damaged_trace_is_refused() -> None:
    calls = with_talk(conversations(5, 100))
    before = pack(calls)
    first, second, *others = pack_calls(calls, find_parents(calls))
    unpacked = unpack_calls([first, second, *others])
    assert pack(calls) == before == pack(unpacked)
    assert unpacked[-1].prompt_ids.dtype == np.int32
    assert msgspec.structs.asdict(unpacked[-1])["tools"] == calls[-1].tools
    for change in CASES["broken"]:
        with pytest.raises(TokensError):
            unpack_calls([first, replace(second, **change)])
