"""The text protocol: an agent writes THOUGHT, TOOL_CALL and FINAL at the start of lines.

    THOUGHT: The test fails in parse().
    TOOL_CALL: {"tool": "read_file", "args": {"path": "parser.py"}}

`parse_message` is pure: a message in, its parts out, in linear time and never an exception.
`run_protocol` is the loop: model, tools, model, until FINAL or a limit. One call per message; text
after a call is dropped, and the model is notified.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from envserver_records.tasks import Json

from envserver import Message, Reply

from .calling import StrictDecoder, Tool, ToolResult, check_characters, use_tool, visible_text

PartType = Literal["thought", "tool_call", "final", "error"]
ErrorCode = Literal[
    "empty", "bad_json", "missing_tool", "bad_args", "multiple_calls", "text_after_call"
]
Ending = Literal["", "final", "steps", "errors", "tool_errors", "truncated"]

RESULT_HEAD = "TOOL RESULT:"
THOUGHTS_IN_A_ROW = 3
CONTEXT_SHARE = 0.85

FORMAT = """\
Each message of yours holds thoughts and then one call of a tool, or the final answer:

THOUGHT: what you think
TOOL_CALL: {"tool": "NAME", "args": {"ARGUMENT": "VALUE"}}

or

FINAL: the answer

THOUGHT:, TOOL_CALL: and FINAL: stand at the start of a line. After TOOL_CALL: comes one JSON object
and nothing else; its result is in my next message. FINAL: ends the task."""

_ERRORS: dict[ErrorCode, str] = {
    "empty": "The message says nothing.",
    "bad_json": "What follows TOOL_CALL: is not one valid JSON object",
    "missing_tool": 'The object after TOOL_CALL: has no string "tool".',
    "bad_args": '"args" of the call is not an object.',
    "multiple_calls": "Only the first call of the message was run: one call per message.",
    "text_after_call": "What followed the call was dropped: end the message after the call.",
}
_MARKER = re.compile(r"^[ \t]*(THOUGHT|TOOL_CALL|FINAL):", re.MULTILINE)
_CALL = re.compile(r"^[ \t]*TOOL_CALL:", re.MULTILINE)
_OPENING = re.compile(r"\s*(?:```(?:json)?)?\s*")
_DECODER = StrictDecoder()


@dataclass(frozen=True)
class Part:
    """One part of a message.

    `text`: of a thought or the final answer; the JSON source of a call; the subject of an error.
    """

    type: PartType
    text: str
    tool: str | None = None
    args: Json | None = None
    code: ErrorCode | None = None


def parse_message(text: str) -> list[Part]:
    """Splits `text` into its parts, in order; at least one.

    At most one call or final answer, and at most one error, which is last; a valid call precedes
    the error about the text after it.
    """
    visible = visible_text(text)
    parts = _parts(visible) if visible is not None else []
    return parts or [_error("empty")]


def _parts(text: str) -> list[Part]:
    parts: list[Part] = []
    position = 0
    while True:
        marker = _MARKER.search(text, position)
        thought = text[position : marker.start() if marker else len(text)].strip()
        if thought:
            parts.append(Part("thought", thought))
        if marker is None:
            return parts
        position = marker.end()
        if marker[1] == "FINAL":
            return [*parts, Part("final", text[position:].strip())]
        if marker[1] == "TOOL_CALL":
            return [*parts, *_call(text, position)]


def _call(text: str, position: int) -> list[Part]:
    """The call whose marker ends at `position`, and the error in it or after it."""
    opening = _OPENING.match(text, position)
    start = opening.end() if opening else position
    try:
        value, end = _DECODER.raw_decode(text, start)
        check_characters(text[start:end], value)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 40]
        where = f"at {near!r}" if near else "at the end"
        return [_error("bad_json", f": {error.msg} {where}.")]
    except (ValueError, RecursionError) as error:
        return [_error("bad_json", f": {str(error)[:200]}.")]
    if not isinstance(value, dict):
        return [_error("bad_json", ".")]
    tool, args = value.get("tool"), value.get("args", {})
    if not isinstance(tool, str):
        return [_error("missing_tool")]
    if not isinstance(args, dict):
        return [_error("bad_args")]
    call = Part("tool_call", text[start:end], tool=tool, args=args)
    if text[end:].strip() in ("", "```"):
        return [call]
    return [call, _error("multiple_calls" if _CALL.search(text, end) else "text_after_call")]


def _error(code: ErrorCode, more: str = "") -> Part:
    return Part("error", _ERRORS[code] + more, code=code)


@dataclass(frozen=True)
class Window:
    """The context of the model, so that old turns are left out before it overflows.

    Args:
        count: tokens of a list of messages, as the model's own tokenizer counts them.
        context_tokens: what prompt and answer may have together.
        max_tokens: of the answer.
    """

    count: Callable[[list[Message]], int]
    context_tokens: int
    max_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return int((self.context_tokens - self.max_tokens) * CONTEXT_SHARE)


@dataclass
class ProtocolRun:
    """The run so far; complete even if an exception ends the loop.

    Args:
        messages: the complete history.
        steps: steps of the trace: `{"i", "type", "text"}`, with "tool" and "args" of calls.
        answer: the text after FINAL.
        ending: why the loop ended; "" while it runs.
        tool_errors: invalid calls, and calls that their tool refused.
    """

    messages: list[Message] = field(default_factory=list)
    steps: list[Json] = field(default_factory=list)
    answer: str | None = None
    ending: Ending = ""
    tool_errors: int = 0

    def note(self, type_: str, text: str, **facts: Any) -> None:
        self.steps.append({"i": len(self.steps), "type": type_, "text": text, **facts})


async def run_protocol(
    chat: Callable[..., Awaitable[Reply]],
    tools: Mapping[str, Tool],
    messages: list[Message],
    *,
    max_steps: int = 30,
    max_retries: int = 3,
    max_tool_errors: int = 10,
    window: Window | None = None,
    record: ProtocolRun | None = None,
    **sampling: Any,
) -> ProtocolRun:
    """Lets a model work with `tools` until it gives a final answer or a limit is reached.

    Args:
        chat: like `Rollout.chat`, with the `sampling` settings; its errors pass through.
        messages: system and task; they always stay in the context.
        max_steps: maximum number of the model's messages.
        max_retries: maximum number of unusable messages in a row.
        window: unset: the whole history.
        record: filled while the loop runs, so that it is known after an exception.
    """
    run = record if record is not None else ProtocolRun()
    run.messages.extend(messages)
    view = _View(run.messages, len(run.messages), window)
    sampling.setdefault("stop", [RESULT_HEAD])
    errors = thoughts = 0
    for _ in range(max_steps):
        reply = await chat(view.messages(), **sampling)
        run.messages.append(reply.message)
        if reply.finish_reason == "length":
            run.note("error", "truncated: the message was cut off at its limit of tokens.")
            run.ending = "truncated"
            return run
        parts = parse_message(reply.content)
        answer = await _act(parts, tools, run)
        last = parts[-1].type
        called = any(part.type == "tool_call" for part in parts)
        errors = errors + 1 if last == "error" and not called else 0
        thoughts = thoughts + 1 if last == "thought" else 0
        run.ending = _ending(run, last, errors >= max_retries, max_tool_errors)
        if run.ending:
            return run
        if thoughts == THOUGHTS_IN_A_ROW:
            thoughts, answer = 0, f"Call a tool, or give the final answer.\n\n{FORMAT}"
        run.messages.append({"role": "user", "content": answer})
    run.ending = "steps"
    return run


async def _act(parts: list[Part], tools: Mapping[str, Tool], run: ProtocolRun) -> str:
    """Records `parts`, runs the call among them; returns the reply to the model."""
    answer = "Go on."
    for part in parts:
        match part.type:
            case "tool_call":
                run.note("tool_call", part.text, tool=part.tool, args=part.args)
                result: ToolResult = await use_tool(tools, part.tool, part.args)
                run.note("tool_result", result.text)
                run.tool_errors += not result.ok
                answer = f"{RESULT_HEAD}\n{result.text}"
            case "error" if part.code in ("multiple_calls", "text_after_call"):
                run.note("error", f"{part.code}: {part.text}")
                answer += f"\n\n({part.text})"
            case "error":
                run.note("error", f"{part.code}: {part.text}")
                answer = f"Error: {part.text}\n\n{FORMAT}"
            case "final":
                run.note("final", part.text)
                run.answer = part.text
            case "thought":
                run.note("thought", part.text)
    return answer


def _ending(run: ProtocolRun, last: PartType, no_more_retries: bool, max_errors: int) -> Ending:
    if last == "final":
        return "final"
    if no_more_retries:
        return "errors"
    return "tool_errors" if run.tool_errors >= max_errors else ""


class _View:
    """The part of a history that the model sees: its start, and as many of the last turns as fit.

    After the start, messages of the model and the replies alternate; both of such a pair are left
    out together, and for good.
    """

    def __init__(self, history: list[Message], start: int, window: Window | None) -> None:
        self._history, self._start, self._first = history, start, start
        self._window = window

    def messages(self) -> list[Message]:
        seen = self._seen()
        if self._window is None:
            return seen
        while len(seen) > self._start + 2 and (
            self._window.count(seen) > self._window.prompt_tokens
        ):
            self._first += 2
            seen = self._seen()
        return seen

    def _seen(self) -> list[Message]:
        return self._history[: self._start] + self._history[self._first :]


def describe_tools(tools: Iterable[Tool]) -> str:
    """`tools` as the system prompt names them: name, description, JSON schema of the arguments."""
    lines = []
    for tool in tools:
        function = tool.description["function"]
        schema = json.dumps(function["parameters"], ensure_ascii=False)
        lines.append(f"{tool.name}: {function['description']}\n  args: {schema}")
    return "\n".join(lines)


def trace(
    run: ProtocolRun,
    *,
    scenario: str,
    model: str,
    hf_id: str = "",
    backend: str = "",
    label: str,
    number: int,
    prompt: str,
    seed: int,
    started: float,
    ended: float | None = None,
) -> Json:
    """The trace of `run`.

    `scenario`: a short name of the task. `label`: of the prompt. `number`: the run's among those of
    the same model and label. `prompt`: the task as sent to the model. `started`, `ended`:
    `time.time()`; unset: now.
    """
    begin = datetime.fromtimestamp(started, UTC)
    seconds = (time.time() if ended is None else ended) - started
    types = [step["type"] for step in run.steps]
    return {
        "run_id": _name(f"{scenario}_{model}_{label}_{number:03d}_{begin:%Y%m%d_%H%M%S}"),
        "scenario": scenario,
        "model": {"name": model, "hf_id": hf_id, "backend": backend},
        "label": label,
        "timestamp": begin.isoformat(),
        "prompt": prompt,
        "seed": seed,
        "steps": run.steps,
        "outcome": {
            "num_steps": len(types),
            "elapsed_seconds": round(seconds, 3),
            "completed": types[-1:] == ["final"],
            "error": "error" in types,
        },
    }


def trace_path(trace: Json, number: int) -> str:
    """The trace's path below the folder of all traces."""
    return f"{_name(trace['model']['name'])}/{_name(trace['label'])}/run_{number:03d}.json"


def _name(text: str) -> str:
    """`text` as a name of a file: a model may be called "maker/model"."""
    return re.sub(r"[^\w.-]|^\.+", "_", text)
