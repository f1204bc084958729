"""Reasoning between `<think>` and `</think>`, as DeepSeek R1 and Qwen 3 write it.

A template may have opened it in the prompt, so that a text without any tag is reasoning that did
not end; or may have closed it there, so that nothing is.
"""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def parse(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
    """(reasoning, what follows it) in `text`, which was sampled behind `prompt_tail`."""
    if prompt_tail.rstrip().endswith(CLOSE):
        return None, text
    before, opened, behind = text.partition(OPEN)
    reasoning, closed, content = (behind if opened else before).partition(CLOSE)
    return reasoning or None, (content or None) if closed else None
