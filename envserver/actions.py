"""Readable steps of a rollout, from an agent's `run.log_action` to its trajectory, bounded.

In a worker: any values -> JSON of bounded size (`encode`). On the server: `Steps` takes batches of
these in order, each step once however often it comes, and gives dicts with `step` (1 to n),
`tool`, `input`, `output`, `ts` (seconds, never falling), and `error` where there was one. What is
cut off is marked.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import orjson

MAX_FIELD_BYTES = 32 * 1024
"""Maximum size of the JSON of one input or output; the rest is cut off."""
MAX_STEPS = 2000
MAX_BYTES = 8 * 1024 * 1024
"""Maximum size of all steps of an attempt together."""
MAX_TOOL_CHARACTERS = 120
CUT = "actions_cut_off"
"""The tool of a last step that stands for those which were left out."""

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_HEAD_CHARACTERS = 4000
_MANY_LEVELS = 100


def encode(tool: str, input: Any, output: Any, ts: float, error: object = "") -> bytes:
    """One step as JSON.

    Raises:
        ValueError: `tool` is not a valid name.
    """
    if not isinstance(tool, str) or not tool.strip():
        raise ValueError("an action needs the name of a tool")
    name = _json(tool.strip()[:MAX_TOOL_CHARACTERS])
    return b'{"tool":%b,"ts":%b,"input":%b,"output":%b,"error":%b}' % (
        name,
        _json(ts),
        _bounded(_json(input)),
        _bounded(_json(output)),
        _json(str(error or "")[:_HEAD_CHARACTERS]),
    )


def batch(first: int, steps: list[bytes], dropped: int) -> bytes:
    """The body that sends `steps`, the first of which has the number `first` (from 0)."""
    return b'{"first":%d,"dropped":%d,"steps":[%b]}' % (first, dropped, b",".join(steps))


class _Sent(msgspec.Struct):
    tool: str
    ts: float
    input: msgspec.Raw
    output: msgspec.Raw
    error: str = ""


class _Batch(msgspec.Struct):
    first: int
    steps: list[_Sent]
    dropped: int = 0


_decoder = msgspec.json.Decoder(_Batch)


class Steps:
    def __init__(self) -> None:
        self._taken: list[dict[str, Any]] = []
        self._next = 0
        self._bytes = 0
        self._dropped = 0
        self._dropped_there = 0

    def take(self, body: bytes) -> None:
        """Takes a batch; what came before is not taken again.

        Raises:
            msgspec.DecodeError: it is none.
        """
        sent = _decoder.decode(body)
        if sent.first < 0 or sent.dropped < 0:
            raise msgspec.ValidationError("numbers of steps begin at 0")
        self._dropped_there = max(self._dropped_there, sent.dropped)
        for number, step in enumerate(sent.steps, sent.first):
            if number >= self._next:
                self._next = number + 1
                self._add(step)

    def taken(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        dropped = self._dropped + self._dropped_there
        if not dropped:
            return list(self._taken)
        ts = self._taken[-1]["ts"] if self._taken else 0.0
        return [*self._taken, _step(len(self._taken) + 1, CUT, ts, {"steps": dropped}, None, "")]

    def _add(self, step: _Sent) -> None:
        size = len(step.input) + len(step.output) + len(step.error)
        if len(self._taken) >= MAX_STEPS or self._bytes + size > MAX_BYTES:
            self._dropped += 1
            return
        self._bytes += size
        before = self._taken[-1]["ts"] if self._taken else 0.0
        ts = max(before, step.ts) if math.isfinite(step.ts) else before
        tool = step.tool.strip()[:MAX_TOOL_CHARACTERS] or "unnamed"
        number = len(self._taken) + 1
        error = step.error[:_HEAD_CHARACTERS]
        made = _step(number, tool, ts, _value(step.input), _value(step.output), error)
        self._taken.append(made)


def _step(number: int, tool: str, ts: float, input: Any, output: Any, error: str) -> dict[str, Any]:
    made = {"step": number, "tool": tool, "input": input, "output": output, "ts": ts}
    return made | {"error": error} if error else made


def _value(raw: msgspec.Raw) -> Any:
    """Parses `raw` to a value that can be written as JSON again."""
    data = bytes(raw)
    try:
        value = orjson.loads(_bounded(data))
        if data.count(b"[") + data.count(b"{") > _MANY_LEVELS:
            orjson.dumps(value)  # no writer goes as deep as the reader
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeDecodeError):
        return {"truncated": True, "bytes": len(data), "head": ""}
    return value


def _bounded(value: bytes) -> bytes:
    """`value` (JSON), or its beginning and how long it was: text stays text."""
    if len(value) <= MAX_FIELD_BYTES:
        return value
    mark = f" [cut off: {len(value)} bytes]"
    text = value.decode()
    if value[:1] == b'"':
        return orjson.dumps(str(orjson.loads(value))[:_HEAD_CHARACTERS] + mark)
    return orjson.dumps({"truncated": True, "bytes": len(value), "head": text[:_HEAD_CHARACTERS]})


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=repr, option=_OPTIONS)
    except TypeError:  # half of a surrogate pair, too deep, too large a number
        return orjson.dumps(str(value).encode("utf-8", "replace").decode())
