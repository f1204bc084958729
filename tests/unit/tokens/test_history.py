"""A request continues the recorded tokens of an earlier call, or is a root."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_records.records import Call, Message, Sequence, pack, unpack
from hypothesis import given
from hypothesis import strategies as st
from support.forests import ACTIONS, calls_of, calm, forests, reference_rows
from support.talk import Talk, talk, written
from support.templates import CHATML, OWN, call, chat_format, tool
from support.traps import TRAPS as TEMPLATE_TRAPS
from support.traps import Trap

from envserver.tokens import Actions, build, check
from envserver.tokens.builder import all_flags

SHOWN, ENDED = "'\\n' + message.content }}", "{%- endfor %}\n{{- '<|im_end|>\\n' }}"
"""Pieces of CHATML that write an answer, and its end."""
USER: Message = {"role": "user", "content": "What is 2 + 2?"}
NEXT: Message = {"role": "user", "content": "And 3 + 3?"}


def said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def spelled(here: Talk, text: str) -> list[int]:
    """`text` letter by letter: ids that encoding it would not give."""
    ids = [id for letter in text for id in here.format.encode(letter)]
    assert ids != here.format.encode(text)
    return ids


def seen(here: Talk, index: int) -> list[int]:
    """What the model had before it after call `index`."""
    before = here.calls[index]
    return [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]


@pytest.mark.parametrize("name", OWN)
def test_a_conversation_goes_on_from_its_own_tokens(name: str) -> None:
    here = talk(name)
    messages = [USER]
    for turn in range(4):
        text = f"It is 4, of course: {turn}."
        plan = here.ask(messages, text, sampled=spelled(here, written(name, said(text))))
        if turn:
            assert (plan.parent, plan.edge, plan.flags) == (turn - 1, "exact", [])
            assert plan.ids is not None
            assert plan.ids[: len(seen(here, turn - 1))] == seen(here, turn - 1)
            assert here.format.decode(plan.ids) == plan.text
        messages = [*messages, said(text), NEXT]
    assert len(build(here.calls)) == 1
    # Tool calls may be written in the model's own way.
    here = talk(name)
    tools = [tool()]
    calls = [call({"expression": "1 + 1", "precision": 2})]
    answer = said(None if name in ("llama", "mistral") else "So:", tool_calls=calls)
    here.end = "<|observation|>" if name == "role_stops" else here.end
    here.ask([USER], answer, tools=tools, sampled=written(name, answer, indent=1))
    plan = here.plan([USER, answer, RESULT], tools)
    edge = "exact" if name == "role_stops" else "whitespace"  # its calls are not JSON
    assert (plan.parent, plan.edge, plan.flags) == (0, edge, [])
    turned = call({"precision": 2, "expression": "1 + 1"})
    assert here.plan([USER, answer | {"tool_calls": [turned]}, RESULT], tools).edge == "calls"
    other = call({"expression": "1 + 2", "precision": 2})
    plan = here.plan([USER, answer | {"tool_calls": [other]}, RESULT], tools)
    assert (plan.edge, plan.flags) == ("root", ["assistant_edited"])


@pytest.mark.parametrize("asks_for_stop", [False, True])
def test_an_agent_that_closes_its_code_itself_is_one_conversation(asks_for_stop: bool) -> None:
    """As smolagents' CodeAgent does: stop strings, parts, strip, its calls in the same message."""
    here = talk("chatml")
    messages: list[Message] = [USER]
    for turn in range(4):
        text = f" Thought: look.\n<code>\nx = {turn}\n"
        content = text + "</code>" if asks_for_stop else text
        plan = here.ask(messages, content, sampled=text + "</code>", stop_reason="</code>")
        assert plan.edge == ("appended" if turn else "root")
        assert plan.flags == []
        kept = f"{text}</code>".strip() + f"\nCalling tools:\n[{{'code': 'x = {turn}'}}]"
        answer = said(None) | {"content": [{"type": "text", "text": kept}]}
        messages = [*messages, answer, {"role": "user", "content": "Observation:\n4"}]
    [row] = build(here.calls)
    assert row.path == [0, 1, 2, 3]


THOUGHT = said("It is 4.", reasoning="Two and two.")
WORKED = said("", reasoning="Work it out.", tool_calls=[call({"expression": "2 + 2"})])
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "4"}
NO_THINKING = {"enable_thinking": False}
EDITED = {"ids": None, "edge": "root", "refusal": "assistant_edited", "flags": ["assistant_edited"]}
PREFILLED = {"edge": "root", "refusal": "ends_with_assistant", "flags": []}
STRIPPED = {"edge": "root", "refusal": "think_stripped", "flags": ["think_stripped"]}
LOST = {"parent": 0, "flags": ["reasoning_dropped_answer_lost", "think_kept"]}


@pytest.mark.parametrize(
    ("name", "settings", "answer", "how", "outcomes"),
    [
        pytest.param(
            *("chatml", {}, "x = 1\n", {"sampled": "x = 1\nObs:", "stop_reason": "Obs:"}),
            [([said("x = 1\n"), NEXT], {"parent": 0, "edge": "lossy_detok"})],
            id="a stop string that stays away is still in the tokens",
        ),
        pytest.param(
            *("chatml", {}, "x = a", {"sampled": "x = assistant", "stop_reason": "s"}),
            [
                ([said("x ="), NEXT], {"parent": None}),
                *(
                    ([said(text), NEXT], {"parent": 0})
                    for text in ("x = a", "x = as", "x = assist")
                ),
            ],
            id="the last token may say more than the stop string or say that twice",
        ),
        pytest.param(
            *("chatml", {"edits": ["exact"]}, "It is 4. ", {}),
            [
                *(
                    ([said(text), NEXT], EDITED)
                    for text in ("It is 5. ", "It is 4.", "It is 4. Right?", "")
                ),
                ([said("It is 4. "), NEXT], {"edge": "exact"}),
            ],
            id="edited answers are not continued",
        ),
        pytest.param(
            *("chatml", {}, "It is 4.", {}),
            [([said("It is 4.")], PREFILLED), ([said("It is")], EDITED)],
            id="a prefill is a root",
        ),
        pytest.param(
            *("thinking", {}, THOUGHT, {"sampled": written("thinking", THOUGHT)}),
            [([THOUGHT, NEXT], STRIPPED), ([said("It is 4."), NEXT], STRIPPED)],
            id="reasoning that the template drops begins a new sequence",
        ),
        pytest.param(
            *("thinking", {}, WORKED, {"sampled": written("thinking", WORKED), "tools": [tool()]}),
            [
                ([WORKED, RESULT], {"edge": "exact"}),
                (
                    [said("", tool_calls=WORKED["tool_calls"]), RESULT],
                    {"refusal": "think_stripped"},
                ),
            ],
            id="reasoning between tool calls is continued where it is sent back",
        ),
        pytest.param(
            *(
                "chatml",
                {"think": "keep"},
                said(None, reasoning="It is 4."),
                {"sampled": "It is 4."},
            ),
            [([said(None), NEXT], LOST)],
            id="an answer that was all reasoning is told when it is lost",
        ),
    ],
)
def test_an_answer_that_comes_back(
    name: str,
    settings: dict[str, Any],
    answer: Any,
    how: dict[str, Any],
    outcomes: list[tuple[list[Message], dict[str, Any]]],
) -> None:
    here = talk(name, **settings)
    here.ask([USER], answer, **how)
    for sent_back, expected in outcomes:
        plan = here.plan([USER, *sent_back], how.get("tools"))
        assert {key: getattr(plan, key) for key in expected} == expected


def test_what_text_cannot_say_is_kept() -> None:
    here = talk("chatml")
    half = here.format.encode("é")[:1]
    assert here.format.decode(half) == "\ufffd"
    ids = [*here.format.encode("So"), *half, *here.format.encode("<|im_start|> it is")]
    here.ask([USER], "So\ufffd it is", sampled=ids)
    plan = here.plan([USER, said("So\ufffd it is"), NEXT])
    assert (plan.parent, plan.edge) == (0, "lossy_detok")
    assert plan.ids is not None and plan.ids[: len(seen(here, 0))] == seen(here, 0)
    assert here.calls[0].flags == ["special_token_in_completion", "lossy_detokenization"]


@pytest.mark.parametrize("parsed", [True, False])
def test_reasoning_is_kept_where_that_is_wanted(parsed: bool) -> None:
    here = talk("thinking", think="keep")
    messages: list[Message] = [USER]
    for turn in range(3):
        text = written("thinking", THOUGHT)
        answer = THOUGHT if parsed else said(text)
        plan = here.ask(messages, answer, sampled=text)
        if turn:
            assert (plan.parent, plan.edge, plan.flags) == (turn - 1, "think_kept", ["think_kept"])
        messages = [*messages, said("It is 4.") if parsed else answer, NEXT]
    assert len(build(here.calls)) == 1


def test_each_of_several_answers_to_one_request_can_be_continued() -> None:
    here = talk("chatml")
    for text in ("It is 4.", "Four.", "It is 4."):
        here.ask([USER], text, sampled=spelled(here, text) if len(here.calls) == 2 else text)
    plan = here.plan([USER, said("Four."), NEXT])
    assert (plan.parent, plan.flags) == (1, [])
    plan = here.plan([USER, said("It is 4."), NEXT])
    assert (plan.parent, plan.flags) == (2, ["ambiguous_parent"])
    here.calls[2].delivered = "none"
    plan = here.plan([USER, said("It is 4."), NEXT])
    assert (plan.parent, plan.flags) == (0, [])


def test_other_agents_tools_and_template_settings_are_other_conversations() -> None:
    here = talk("chatml")
    here.ask([USER], "It is 4.")
    messages = [USER, said("It is 4."), NEXT]
    assert here.plan(messages).parent == 0
    others: dict[str, Any] = {
        "agent": "search", "tools": [tool()], "kwargs": NO_THINKING, "model": "other",
    }  # fmt: skip
    for name, other in others.items():
        plan = here.plan(messages, **{name: other})
        assert (plan.edge, plan.refusal, plan.flags) == ("root", None, [])
    here.ask([USER], "It is 4.", agent="search")
    assert here.plan(messages, agent="search").parent == 1


def test_answers_that_nobody_sampled_are_told() -> None:
    here = talk("chatml")
    shots = [USER, said("4"), NEXT]
    plan = here.ask(shots, "6")
    assert (plan.edge, plan.flags) == ("root", ["unsampled_assistant_in_history"])
    plan = here.ask([*shots, said("6"), USER], "4.")
    assert (plan.parent, plan.flags) == (0, [])
    plan = here.plan([*shots, said("6")])
    assert (plan.refusal, plan.flags) == ("ends_with_assistant", ["unsampled_assistant_in_history"])
    compacted = here.plan([{"role": "user", "content": "In short"}, said(" 4."), NEXT])
    assert (compacted.edge, compacted.flags) == ("root", [])


def test_another_prompt_than_ours_ends_all_continuing_and_images_are_the_engines() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoA"}}
    plan = talk("chatml").plan([{"role": "user", "content": [image]}])
    assert (plan.ids, plan.text, plan.flags) == (None, None, ["multimodal_unstitched"])
    here, messages = talk("chatml"), [USER, said("It is 4."), NEXT]
    here.ask([USER], "It is 4.")
    here.ask(messages, "6", echo=[1, 2, 3])
    assert here.calls[1].flags == ["prompt_mismatch"]
    assert here.plan([*messages, said("6"), NEXT]).edge == "root"
    assert here.plan(messages).parent == 0
    here.ask([NEXT], "6", echo=here.format.prompt_ids([USER], None, {}))
    assert here.calls[2].flags == ["render_mismatch"]
    assert not here.format.trusted
    assert here.plan(messages).edge == "root"


TRAPS = {
    **TEMPLATE_TRAPS,
    "cuts_old_answers": Trap(CHATML.replace(SHOWN, "'\\n' + message.content[:5] }}"), True),
    "shows_capitals": Trap(CHATML.replace(SHOWN, "'\\n' + message.content | upper }}"), True),
    "hides_that_turns_end": Trap(CHATML.replace(ENDED, "{%- endfor %}\n{{- '\\n' }}")),
}


@pytest.mark.parametrize("name", TRAPS)
def test_templates_that_rewrite_the_past_make_roots(name: str) -> None:
    source, tail_is_right = TRAPS[name]
    assert source != CHATML
    here = Talk(chat_format(source, stops=["<|im_end|>"]), "<|im_end|>")
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
    for turn in range(3):
        text = f"It is 4, of course: {turn}."
        plan = here.ask(messages, text, sampled=spelled(here, text))
        assert plan.ids is None or not tail_is_right
        if plan.ids is not None:  # these messages do not run into the trap
            assert here.format.decode(plan.ids) == plan.text
        messages = [*messages, said(text), NEXT]


# Any forest of calls becomes rows in which each sampled token is trained exactly once


@calm
@given(forests(), st.sampled_from(list(ACTIONS.values())))
def test_rows_are_those_of_the_definition_and_train_every_sampled_token_once(
    calls: list[Call], actions: Actions
) -> None:
    rows = build(calls, actions)
    check(calls, rows, actions)
    assert pack(rows) == pack(reference_rows(calls, actions))
    assert [pack(unpack(pack(row), Sequence)) for row in rows] == [pack(row) for row in rows]
    trained = sum(int(row.mask.sum()) for row in build(calls))
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


ROWS = tomllib.loads(Path(__file__).with_name("forests.toml").read_text())["rows"]


@pytest.mark.parametrize("name", ROWS)
def test_what_becomes_rows(name: str) -> None:
    calls, rows = calls_of(ROWS[name]["calls"]), ROWS[name]["rows"]
    built = build(calls, ACTIONS[ROWS[name]["actions"]])
    for row, columns in zip(built, rows, strict=True):
        assert {name: np.array(getattr(row, name)).tolist() for name in columns} == columns
    assert all_flags(calls, built) == sorted({flag for row in built for flag in row.flags})
