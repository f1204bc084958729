"""The texts that models get: the assistant, the simulated customer, the judge. All in our words."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envserver_environments.demonstrations import prompt_beside

from ..episodes import GREETING
from ..tasks import TauMessage

_text = functools.partial(prompt_beside, __file__)
_SCENARIO = {
    "reason_for_call": "Why you write",
    "known_info": "What you know",
    "unknown_info": "What you do not know",
    "task_instructions": "How you behave",
}


def agent_prompt(policy: str, context: str = "") -> str:
    """`context` is what a person wants it to know besides."""
    prompt = _text("agent").format(greeting=GREETING, policy=policy.strip())
    return f"{prompt}\n\n{_text('context').format(context=context.strip())}" if context else prompt


def text_prompt() -> str:
    return _text("text")


def user_prompt(scenario: Mapping[str, Any], *, has_tools: bool) -> str:
    prompt = _text("user").replace("{scenario}", scenario_text(scenario))
    return f"{prompt}\n\n{_text('user_tools')}" if has_tools else prompt


def scenario_text(scenario: Mapping[str, Any]) -> str:
    parts = []
    if scenario.get("persona"):
        parts.append(f"Who you are:\n{scenario['persona']}")
    instructions = scenario.get("instructions")
    if isinstance(instructions, Mapping):
        parts += [
            f"{title}:\n{instructions[name]}"
            for name, title in _SCENARIO.items()
            if instructions.get(name)
        ]
    elif instructions:
        parts.append(str(instructions))
    return "\n\n".join(parts)


def judge_messages(
    assertions: Sequence[str], messages: Sequence[TauMessage]
) -> list[dict[str, str]]:
    """Returns the judge's prompt: the conversation, and the assertions."""
    listed = "\n".join(f"{place}. {text}" for place, text in enumerate(assertions, start=1))
    shown = "\n".join(_shown(message) for message in messages)
    request = f"<conversation>\n{shown}\n</conversation>\n\nExpectations:\n{listed}"
    return [{"role": "system", "content": _text("judge")}, {"role": "user", "content": request}]


def _shown(message: TauMessage) -> str:
    if message["role"] == "tool":
        return f"result for the {message['requestor']}: {message['content']}"
    if message.get("tool_calls"):
        calls = [[call["name"], call["arguments"]] for call in message["tool_calls"]]
        return f"{message['role']} calls: {json.dumps(calls, ensure_ascii=False)}"
    return f"{message['role']}: {message['content']}"
