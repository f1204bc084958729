"""If a template renders an answer differently than it was sampled, the difference is named.

Our rendering is matched with that of an engine that has default template variables.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.templates import KINDS, THINKING, chat_format, tool, user

from envserver.models.probe import Echo
from envserver.tokens import ChatFormat
from envserver.tokens.agreement import agreeing
from envserver.tokens.comparison import Segment, compare
from envserver.tokens.edits import AnswerContent

ASK, HEAD, END, NEXT = "<U>How much?<E>", "<A>", "<E>", "<U>And now?<E><A>"
CALLS = (("call-1", "add", '{"one":1.5,"two":["a \\"b\\"",true]}'),)
WRITTEN = '<call>{"one": 1.5, "two": ["a \\"b\\"", true], "name": "add"}</call>'
SAMPLED = '<call>{"name": "add", "arguments": {"one": 1.5, "two": ["a \\"b\\"", true]}}</call>'
TURNS = tomllib.loads(Path(__file__).with_name("comparisons.toml").read_text())["turns"]


@pytest.mark.parametrize(("sampled", "shown", "more", "differences"), TURNS)
def test_differences_have_names(
    sampled: str, shown: str, more: dict[str, Any], differences: list[str]
) -> None:
    sampled, shown = sampled.replace("CALL", SAMPLED), shown.replace("CALL", WRITTEN)
    more = {name: tuple(told) if name == "specials" else told for name, told in more.items()}
    called = more.pop("called", None)
    answer = AnswerContent(sampled, ()) if called is None else AnswerContent(called, CALLS)
    segment = Segment(context=ASK + HEAD, sampled=sampled, answer=answer, **more)
    whole = ASK + HEAD + shown + END + NEXT
    assert compare([segment], END + NEXT, whole, lambda: HEAD) == [{*differences}]
    later = Segment(context=END + NEXT, sampled="Six.", answer=AnswerContent("Six.", ()))
    found = compare([segment, later], END + NEXT, whole + "Six." + END + NEXT, lambda: HEAD)
    assert found[0] == {*differences}


ONE = Segment(context=ASK + HEAD, sampled="Four." + END, answer=AnswerContent("Four.", ()))
TWO = Segment(context=NEXT, sampled="Six." + END, answer=AnswerContent("Six.", ()))


@pytest.mark.parametrize(
    "shown",
    [
        f"<U>How many?<E><A>Four.<E>{NEXT}Six.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>{NEXT}And",
        f"{ASK}<A>Four.<E><U>And then?<E><A>Six.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}",
        f"{ASK}<A>Four.<E>{NEXT}Six.<E>{NEXT.replace('now', 'you')}",
        "",
    ],
)
def test_a_changed_context_is_no_difference_in_a_turn(shown: str) -> None:
    assert {"other"} in compare([ONE, TWO], NEXT, shown, lambda: HEAD)


# Our rendering and an engine's

QUESTION = [user("How much is 2 + 2?")]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
STYLED = THINKING.replace("{%- if messages[0]", "{{- style }}{%- if messages[0]", 1)


def echoes(engine: ChatFormat) -> list[Echo]:
    """What the probe learns of an engine that renders by `engine`."""
    return [
        Echo(
            messages=QUESTION,
            tools=tools,
            prompt_ids=engine.prompt_ids(QUESTION, tools or None, {}),
        )
        for tools in ([], [tool()])
    ]


@pytest.mark.parametrize(
    ("template", "engines", "told", "found", "hint"),
    [
        (THINKING, {}, None, {}, ""),
        (THINKING, OFF, None, OFF, ""),
        (THINKING, ON, None, {}, ""),  # the same as without it
        (THINKING, {}, OFF, None, "They are equal with --openai.default_template_kwargs '{}'."),
        (THINKING, OFF, {}, None, "--openai.default_template_kwargs '{\"enable_thinking\":false}'"),
        (STYLED, {"style": "low"}, None, {"style": "low"}, ""),
        (STYLED, {"style": "odd"}, None, None, "give the same to --openai.default_template_kwargs"),
        (STYLED, {"style": "odd"}, {"style": "odd"}, {"style": "odd"}, ""),
    ],
)
def test_default_variables_are_told_or_found_and_never_guessed_wrong(
    template: str,
    engines: dict[str, Any],
    told: dict[str, Any] | None,
    found: dict[str, Any] | None,
    hint: str,
) -> None:
    ours = chat_format(template, KINDS[0])
    agreed, why = agreeing(ours, echoes(ours.with_defaults(engines)), told)
    assert (None if agreed is None else agreed.defaults) == found
    assert hint in why
    assert bool(why) == (found is None)


def test_a_requests_own_variable_wins_and_a_null_leaves_the_default() -> None:
    ours = chat_format(THINKING, KINDS[0]).with_defaults(OFF)
    plain = ours.prompt_text(QUESTION, None, {})
    assert "</think>" in plain
    assert "</think>" not in ours.prompt_text(QUESTION, None, ON)
    assert ours.prompt_text(QUESTION, None, {"enable_thinking": None}) == plain
    assert ours.prompt_text(QUESTION, None, {"enable_thinking": "auto"}) == plain
