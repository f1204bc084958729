"""Implements the tools inside the sandbox, with nothing but the standard library.

In: one request on standard input, `{"tool", "arguments"}`. Out: one object of bounded size on
standard output: the tool's result, or `{"error"}` in words for the model. Both are compressed JSON.
Paths are relative to the directory that the program starts in, which models know as /work. The
programs of a sandbox run one after the other: nothing changes between a check and an opening.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

from .files import Refused, append_file, edit, grep, list_dir, read_file, shown, write_file
from .patches import git_patch

MAX_CHARACTERS = 20_000

HEAD_BYTES = TAIL_BYTES = 5000
MAX_OUTPUT_BYTES = 16_000_000
_AFTER_SECONDS = 0.2


def run_command(argv: list[str], seconds: float) -> dict[str, Any]:
    """Runs a program; copies the head of its output to standard error at once, so that the head is
    known even if the program takes this process down with it."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise Refused(f"{shown(argv[0])!r} cannot be started: {error.strerror}.") from error
    assert process.stdout is not None
    killed_by, total, tail = _drain(process, process.stdout.fileno(), time.monotonic() + seconds)
    status = process.wait()
    cut = max(0, total - HEAD_BYTES - len(tail))
    return {"status": status, "killed_by": killed_by, "cut": cut, "tail": tail.decode("latin-1")}


def _drain(process: subprocess.Popen[bytes], pipe: int, end: float) -> tuple[str, int, bytes]:
    """Reads until the program has ended; kills it past its time or output.

    Returns the limit that killed it, the size of its output, and the last bytes beyond the head.
    """
    total, tail = 0, bytearray()
    ended = False
    while True:
        if not ended and process.poll() is not None:
            # Background processes may hold the pipe for ever.
            ended, end = True, time.monotonic() + _AFTER_SECONDS
        left = end - time.monotonic()
        ready = select.select([pipe], [], [], max(0.0, min(0.05, left)))[0]
        if ended and (left <= 0 or not ready):
            return "", total, bytes(tail)
        if left <= 0 or total > MAX_OUTPUT_BYTES:
            os.killpg(process.pid, signal.SIGKILL)
            return "wall" if left <= 0 else "output", total, bytes(tail)
        if not ready:
            continue
        data = os.read(pipe, 65536)
        if not data:
            break
        head = data[: max(0, HEAD_BYTES - total)]
        _say(head)
        tail += data[len(head) :]
        del tail[:-TAIL_BYTES]
        total += len(data)
    return _wait(process, end), total, bytes(tail)


def _wait(process: subprocess.Popen[bytes], end: float) -> str:
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "wall"
    return ""


def _say(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


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
