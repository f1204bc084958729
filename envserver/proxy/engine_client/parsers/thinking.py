"""Parses reasoning between `<think>` and `</think>`, as DeepSeek R1 and Qwen 3 write it.

If the template opened the tag in the prompt, a text without tags is unfinished reasoning; if the
template closed it there, nothing is reasoning.
"""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def parse_reasoning(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
    """Returns (reasoning, the rest) of `text`, which was sampled after `prompt_tail`."""
    if prompt_tail.rstrip().endswith(CLOSE):
        return None, text
    before, opened, behind = text.partition(OPEN)
    reasoning, closed, content = (behind if opened else before).partition(CLOSE)
    return reasoning or None, (content or None) if closed else None
