"""Shared parts of environments: system prompts as files, messages as a model would write them, and
results with a known reward."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from envserver_records.tasks import Json

from envserver import KnownResult, Message, Result


@functools.cache
def prompt_beside(module: str, name: str) -> str:
    """The text of `NAME.txt` beside the file of a module."""
    return (Path(module).parent / f"{name}.txt").read_text(encoding="utf-8").strip()


def table_beside(module: str, name: str | None = None) -> Json:
    """The table in the TOML file beside a module: `NAME.toml`, else of the module's own name."""
    path = Path(module).with_name(f"{name}.toml") if name else Path(module).with_suffix(".toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


_SECTION = re.compile(r"^=== (.+)\n", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """The parts of a text by their titles: each follows a line `=== TITLE`."""
    _, *parts = _SECTION.split(text)
    bodies = (f"{body.strip(chr(10))}\n" for body in parts[1::2])
    return dict(zip(parts[::2], bodies, strict=True))


def text_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_message(tool: str, text: str = "", /, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{tool}", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def written_call(tool: str, thought: str = "", /, **arguments: Any) -> Message:
    """A call in plain text."""
    call = json.dumps({"tool": tool, "args": arguments}, ensure_ascii=False)
    return text_message(
        f"THOUGHT: {thought}\nTOOL_CALL: {call}" if thought else f"TOOL_CALL: {call}"
    )


class Known:
    """Makes results with a known reward; `empty`: the fields of an output that says nothing."""

    def __init__(self, **empty: Any) -> None:
        self._empty = empty

    def result(self, **said: Any) -> Result:
        return Result(output={**self._empty, **said})

    def right(self, name: str, /, least: float = 1.0, **said: Any) -> KnownResult:
        return KnownResult(name, self.result(**said), least=least, most=1.0)

    def wrong(self, name: str, /, most: float = 0.0, **said: Any) -> KnownResult:
        return KnownResult(name, self.result(**said), most=most)

    def cut_off(self, name: str, /, **said: Any) -> KnownResult:
        output = {**self._empty, **said}
        return KnownResult(name, Result(output=output, finish_reason="length", truncated=True))
