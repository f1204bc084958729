"""Asks the person at the terminal for the model's next answer (`run --interactive`).

Lines are typed until an empty one; a line `!tool {"json": ...}` is a tool call. Ctrl-D leaves.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from envserver_records.records import Message

from ..running.asking import Asked
from .console import Console
from .conversation import show_messages

_HELP = (
    "You are the model. Type an answer; an empty line sends it. A line that begins with ! calls a "
    'tool: !search {"query": "..."}. Ctrl-D leaves.'
)


class Person:
    """Shows each request and reads its answer.

    Args:
        read: returns a typed line, after the prompt; raises EOFError at the end.
    """

    def __init__(self, console: Console, read: Callable[[str], str] = input) -> None:
        self._console = console
        self._read = read
        self._shown: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def answer(self, asked: Asked) -> Message | None:
        """Returns the typed message; None at the end of the input. Blocks."""
        if not self._shown:
            self._say(_HELP)
        agent = asked.line.partition("/")[2]
        if agent:
            self._say(f"Agent {agent}:")
        show_messages(self._console, asked.messages[self._shown.get(asked.line, 0) :])
        # The answer itself is the next message; the person has typed it, and need not see it.
        self._shown[asked.line] = len(asked.messages) + 1
        for tool in asked.tools:
            self._say(f"  !{_signature(tool['function'])}")
        try:
            return self._typed(asked.tools)
        except EOFError:
            return None

    def _typed(self, tools: Sequence[dict[str, Any]]) -> Message:
        lines: list[str] = []
        calls: list[dict[str, Any]] = []
        while True:
            line = self._read("> ")
            if not line.strip():
                break
            if not line.startswith("!"):
                lines.append(line)
            elif complaint := self._called(line, tools, calls):
                self._say(f"{complaint} Type it again.")
        return {"role": "assistant", "content": "\n".join(lines), "tool_calls": calls}

    def _called(
        self, line: str, tools: Sequence[dict[str, Any]], calls: list[dict[str, Any]]
    ) -> str:
        """Adds the call of `line` to `calls`, or returns what is wrong with it."""
        name, _, text = line[1:].strip().partition(" ")
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        if name not in schemas:
            return f"There is no tool {name!r}: {', '.join(schemas) or 'no tools are offered'}."
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            return f"The arguments are not JSON: {error}."
        if wrong := _invalid(arguments, schemas[name] or {}):
            return f"{name} does not take that: {wrong}."
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append(
            {"id": f"call_{next(self._numbers)}", "type": "function", "function": function}
        )
        return ""

    def _say(self, text: str) -> None:
        self._console.say(text, style="dim")


def _signature(function: dict[str, Any]) -> str:
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    names = ", ".join(
        f"{name}{'' if name in required else '?'}" for name in schema.get("properties") or {}
    )
    return f"{function['name']} {{{names}}}  {function.get('description') or ''}".rstrip()


def _invalid(arguments: Any, schema: dict[str, Any]) -> str:
    """Returns why the schema does not allow the arguments; "" if it does."""
    from jsonschema import Draft202012Validator

    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    error = next(iter(Draft202012Validator(schema).iter_errors(arguments)), None)
    return "" if error is None else error.message
