"""Implements the tools inside the sandbox, with nothing but the standard library.

In: one request on standard input, `{"tool", "arguments"}`. Out: one object of bounded size on
standard output: the tool's result, or `{"error"}` in words for the model. Both are compressed JSON.
Paths are relative to the directory that the program starts in, which models know as /work. The
programs of a sandbox run one after the other: nothing changes between a check and an opening.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from typing import Any

from .commands import run_command
from .files import Refused, append_file, edit, grep, list_dir, read_file, shown, write_file
from .patches import git_patch

MAX_CHARACTERS = 20_000

TOOLS: dict[str, Callable[..., dict[str, Any]]] = {
    tool.__name__: tool
    for tool in (
        append_file, edit, git_patch, grep, list_dir, read_file, run_command, write_file,
    )
}  # fmt: skip


def main() -> None:
    request = json.loads(zlib.decompress(sys.stdin.buffer.read()))
    answer = answer_to(request["tool"], request["arguments"])
    sys.stdout.buffer.write(zlib.compress(json.dumps(answer).encode()))


def answer_to(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs a tool; the result, or `{"error"}`."""
    try:
        answer = TOOLS[tool](**arguments)
    except Refused as refusal:
        answer = {"error": str(refusal)}
    except OSError as error:
        place = f"{shown(arguments['path'])}: " if "path" in arguments else ""
        answer = {"error": f"{place}{error.strerror or error}."}
    except ValueError as error:  # a NUL character in a path
        answer = {"error": f"{error}."}
    text = answer.get("text", "")
    if len(text) > MAX_CHARACTERS:
        answer["text"] = f"{text[:MAX_CHARACTERS]}\n[cut: the result is longer]"
    return answer
