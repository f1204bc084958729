"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
from typing import Any, Literal

from envserver_environments.demonstrations import prompt_beside

ShowTests = Literal["0", "1", "all"]

SOLUTION = "solution.py"
_LAST_WORD = {
    "single": "Reply with one ```python block.",
    "tools": "Call submit with the whole program when it is done.",
    "harness": f"Write the whole program into the file {SOLUTION} of the current folder.",
}
_PROGRAM = "The program must read standard input and print to standard output."
_SHOWN_CHARACTERS = 1000
REMINDER = "There is no program yet. Call submit, or reply with one ```python block."


system_prompt = functools.partial(prompt_beside, __file__)


def question(public: dict[str, Any], mode: str, show_tests: ShowTests) -> str:
    parts = [str(public["instruction"])]
    tests = public["tests"] if show_tests == "all" else public["tests"][: int(show_tests)]
    if tests and public["entry_point"]:
        parts.append("It must pass:\n```python\n" + "\n".join(tests) + "\n```")
    elif tests:
        parts.append("For example:\n" + "\n\n".join(map(shown_test, tests)))
    form = f"The function must be named `{public['entry_point']}`."
    parts.append(f"{form if public['entry_point'] else _PROGRAM} {_LAST_WORD[mode]}")
    return "\n\n".join(parts)


def shown_test(test: str | dict[str, str]) -> str:
    if isinstance(test, str):
        return test
    given, wanted = (_cut(test[part].rstrip("\n")) for part in ("input", "output"))
    return f"Input:\n```\n{given}\n```\nOutput:\n```\n{wanted}\n```"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
