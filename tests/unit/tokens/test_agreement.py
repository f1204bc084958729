"""Our rendering is matched with that of an engine that has default template variables."""

from __future__ import annotations

from typing import Any

import pytest
from support.templates import KINDS, THINKING, chat_format, tool, user

from envserver.models.probe import Echo
from envserver.tokens import ChatFormat
from envserver.tokens.agreement import agreeing

ASK = [user("How much is 2 + 2?")]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
TWO = THINKING.replace("{%- if messages[0]", "{{- style }}{%- if messages[0]", 1)


def echoes(engine: ChatFormat) -> list[Echo]:
    """What the probe learns of an engine that renders by `engine`."""
    return [
        Echo(messages=ASK, tools=tools, prompt_ids=engine.prompt_ids(ASK, tools or None, {}))
        for tools in ([], [tool()])
    ]


@pytest.mark.parametrize(
    ("template", "engines", "told", "found", "hint"),
    [
        (THINKING, {}, None, {}, ""),
        (THINKING, OFF, None, OFF, ""),
        (THINKING, OFF, OFF, OFF, ""),
        (THINKING, ON, None, {}, ""),  # the same as without it
        (THINKING, {}, OFF, None, "They are equal with --openai.default_template_kwargs '{}'."),
        (THINKING, OFF, {}, None, "--openai.default_template_kwargs '{\"enable_thinking\":false}'"),
        (TWO, {"style": "low"}, None, {"style": "low"}, ""),
        (TWO, {"style": "odd"}, None, None, "give the same to --openai.default_template_kwargs"),
        (TWO, {"style": "odd"} | OFF, {"style": "odd"} | OFF, {"style": "odd"} | OFF, ""),
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
    plain = ours.prompt_text(ASK, None, {})
    assert "</think>" in plain
    assert "</think>" not in ours.prompt_text(ASK, None, ON)
    assert ours.prompt_text(ASK, None, {"enable_thinking": None}) == plain
    assert ours.prompt_text(ASK, None, {"enable_thinking": "auto"}) == plain
