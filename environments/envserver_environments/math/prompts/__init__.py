"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
from typing import Any

from envserver_environments.demonstrations import prompt_beside

BOXED = "Put the final answer into \\boxed{...} in your last message."
"""Told to other programs that play the agent."""
_LETTER_RULE = "Answer with the letter of the right option."


system_prompt = functools.partial(prompt_beside, __file__)


def question(public: dict[str, Any]) -> str:
    """The user message for a task: its question, and its options with their letters."""
    if not public["options"]:
        return str(public["question"])
    options = [f"{chr(ord('A') + i)}) {option}" for i, option in enumerate(public["options"])]
    return "\n".join([public["question"], *options, _LETTER_RULE])
