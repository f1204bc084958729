"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

ShowTests = Literal["0", "1", "all"]

_LAST_WORD = {
    "single": "Reply with one ```python block.",
    "tools": "Call submit with the whole program when it is done.",
}
REMINDER = "There is no program yet. Call submit, or reply with one ```python block."


@functools.cache
def system_prompt(mode: str) -> str:
    """The system prompt of a mode."""
    return (Path(__file__).parent / f"{mode}.txt").read_text(encoding="utf-8").strip()


def question(public: dict[str, Any], mode: str, show_tests: ShowTests) -> str:
    """The user message for a task: what to write, its name, and as many tests as may be shown."""
    parts = [str(public["instruction"])]
    tests = public["tests"] if show_tests == "all" else public["tests"][: int(show_tests)]
    if tests:
        parts.append("It must pass:\n```python\n" + "\n".join(tests) + "\n```")
    parts.append(f"The function must be named `{public['entry_point']}`. {_LAST_WORD[mode]}")
    return "\n\n".join(parts)
