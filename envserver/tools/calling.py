"""Runs a model's tool calls: checks arguments strictly, never raises for what a model wrote.

JSON is strict (no duplicate keys, NaN or lone surrogates); the arguments must be an object that is
valid against the tool's JSON schema. An exception other than ToolError raised by a tool is a bug in
the tool and propagates.
"""

from __future__ import annotations

import inspect
import json
import math
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from envserver_records.errors import ConfigError, EnvserverError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


MAX_RESULT_CHARACTERS = 4000
CUT_MARKER = "\n[cut: the result is longer]"


Timed = Callable[[str, float, float], None]
"""Gets a tool's name, when a call of it began (`time.time()`), and the seconds that it took."""
TIMED: ContextVar[Timed | None] = ContextVar("envserver_timed", default=None)
"""Called with each call of a tool in its context, also a refused one; the server times its own."""


class ToolError(Exception):
    """The call cannot be carried out; the message is shown to the model."""


@dataclass(frozen=True)
class Tool:
    """A function tool.

    Args:
        description: in OpenAI's format.
        function: gets the arguments by name; plain or `async`. It may raise ToolError.
        max_characters: longer results are cut.
        parallel: whether its calls in one message may run at the same time.
        on_server: whether the server runs it (see `typed.tool`).
    """

    description: dict[str, Any]
    function: Callable[..., str | Awaitable[str]]
    max_characters: int = MAX_RESULT_CHARACTERS
    parallel: bool = False
    on_server: bool = False

    @property
    def name(self) -> str:
        return str(self.description["function"]["name"])

    @cached_property
    def validator(self) -> Draft202012Validator:
        from jsonschema import Draft202012Validator

        return Draft202012Validator(self.description["function"]["parameters"])

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns valid arguments, as the function takes them; a ToolError names the wrong one."""
        try:
            broken = next(iter(self.validator.iter_errors(arguments)), None)
        except RecursionError:
            raise ToolError(f"the arguments of {self.name} are nested too deeply.") from None
        if broken is not None:
            place = f" (at `{broken.json_path}`)" if broken.path else ""
            reason = _short(f"{broken.message}{place}")
            raise ToolError(f"the arguments of {self.name} are not valid: {reason}")
        return arguments


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: its text for the model, and whether the call succeeded."""

    text: str
    ok: bool


EndReason = Literal["final_tool", "text", "cut_off", "limit"]


@dataclass(frozen=True)
class LoopEnd:
    """How a loop ended.

    Args:
        reason: "limit" means the turns or the tool errors.
        text: the last message's text; may be empty.
        last_text: the last text that is not empty.
        result: what the final tool returned; None without a valid call of it.
    """

    reason: EndReason
    text: str
    last_text: str
    result: str | None = None


def function_tool(
    name: str, does: str, properties: dict[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """Describes a function tool in OpenAI format; other arguments are refused."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": does,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(required),
                "additionalProperties": False,
            },
        },
    }


def toolbox(*tools: Tool) -> dict[str, Tool]:
    """Returns a dict of tools by name."""
    return {tool.name: tool for tool in tools}


def descriptions(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Returns the `tools` argument of a chat completion."""
    return [tool.description for tool in tools]


def run_tool_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> ToolResult:
    """Runs `call` with the tool it names, which must be a plain function.

    Returns:
        The result, cut at the tool's limit; "Error: ..." if the call is not valid.
    """
    try:
        tool, arguments = checked_call(tools, call)
    except ToolError as error:
        return _refused_call(tools, call, error)
    try:
        with _timing(tool):
            text = tool.function(**arguments)
    except ToolError as error:
        return refused(error)
    if not isinstance(text, str):
        if inspect.iscoroutine(text):
            text.close()
        raise TypeError(f"{tool.name} is asynchronous: await call_tool(tools, call)")
    return ToolResult(cut(text, tool.max_characters), ok=True)


async def call_tool(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> ToolResult:
    """Runs `call` with a plain or asynchronous tool; otherwise like `run_tool_call`."""
    try:
        tool, arguments = checked_call(tools, call)
    except ToolError as error:
        return _refused_call(tools, call, error)
    return await _called(tool, arguments)


async def use_tool(tools: Mapping[str, Tool], name: object, arguments: object) -> ToolResult:
    """Like `call_tool`, for arguments that are already parsed."""
    try:
        tool, valid = checked_arguments(tools, name, arguments)
    except ToolError as error:
        return _refused_call(tools, {"function": {"name": name}}, error)
    return await _called(tool, valid)


async def _called(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    try:
        with _timing(tool):
            outcome = tool.function(**arguments)
            text = await outcome if inspect.isawaitable(outcome) else outcome
    except ToolError as error:
        return refused(error)
    return ToolResult(cut(str(text), tool.max_characters), ok=True)


@contextmanager
def _timing(tool: Tool) -> Iterator[None]:
    began = time.time()
    try:
        yield
    finally:
        if not tool.on_server:
            _notify(tool, began)


def _refused_call(
    tools: Mapping[str, Tool], call: Mapping[str, Any], error: ToolError
) -> ToolResult:
    """Returns the result of a call that never ran; its tool, if it names one, is notified."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    tool = tools.get(name) if isinstance(name, str) else None
    if tool is not None:
        _notify(tool, time.time())
    return refused(error)


def _notify(tool: Tool, began: float) -> None:
    if (timed := TIMED.get()) is not None:
        timed(tool.name, began, time.time() - began)


def refused(error: ToolError) -> ToolResult:
    """Returns the result of a call that cannot be carried out."""
    return ToolResult(cut(f"Error: {error}"), ok=False)


def checked_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[Tool, dict[str, Any]]:
    """Returns the tool that `call` names, and its arguments, or raises ToolError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError("a tool call must hold a function.")
    tool = _named(tools, function.get("name"))
    source = function.get("arguments")
    if not isinstance(source, str):
        raise ToolError("the arguments must be a JSON object, as a string.")
    try:
        arguments = json.loads(source, cls=StrictDecoder)
        check_characters(source, arguments)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from error
    return checked_arguments(tools, tool.name, arguments)


def checked_arguments(
    tools: Mapping[str, Tool], name: object, arguments: object
) -> tuple[Tool, dict[str, Any]]:
    """Like `checked_call`, for arguments that are already parsed."""
    tool = _named(tools, name)
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object.")
    return tool, tool.checked(arguments)


def cut(text: str, limit: int = MAX_RESULT_CHARACTERS) -> str:
    """Cuts `text` to `limit` characters and appends a marker if it was longer."""
    return text if len(text) <= limit else text[:limit] + CUT_MARKER


class StrictDecoder(json.JSONDecoder):
    """Strict JSON: ValueError for NaN, numbers out of range and duplicate keys."""

    def __init__(self) -> None:
        super().__init__(
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_no_duplicates,
        )


def check_characters(source: str, value: object) -> None:
    """Raises ValueError if `value`, decoded from `source`, contains a lone surrogate."""
    if "\\u" in source or not source.isascii():
        json.dumps(value, ensure_ascii=False).encode()


def _named(tools: Mapping[str, Tool], name: object) -> Tool:
    if not isinstance(name, str) or name not in tools:
        raise ToolError(f"there is no tool {_short(repr(name))}; there are: {', '.join(tools)}.")
    return tools[name]


def _short(text: str) -> str:
    """Shortens an error message to its start and its end, which names the fault."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen ",
)


def is_bug(error: Exception) -> bool:
    """Whether a tool's exception is a bug of its author: it has no other meaning here."""
    return not isinstance(error, EnvserverError | ToolError | OSError)


def may_be_bug(error: BaseException) -> dict[str, str]:
    """Returns the detail of an error that a mistake in the environment's code may have raised:
    a plain exception of Python, a missing file, a refused request; not one of a library nor of the
    system."""
    is_refused = isinstance(error, EnvserverError) and error.detail.get("status") in _REFUSED
    is_plain = type(error).__module__ == "builtins" and not isinstance(error, OSError)
    is_bug = is_refused or is_plain or isinstance(error, FileNotFoundError | NotADirectoryError)
    return {"may_be_bug": "yes"} if is_bug else {}


_REFUSED = (400, 404, 422)


@contextmanager
def blaming(
    problem: str, method: Callable[..., Any] | None = None, hint: str = ""
) -> Iterator[None]:
    """Makes a ConfigError that begins with `problem` of what the environment's code raises within
    the block. `method`: see `place_of`."""
    try:
        yield
    except EnvserverError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{problem}: {type(error).__name__}: {error} {place_of(error, method)}"
        raise ConfigError(text, hint=hint) from error


def place_of(error: BaseException, method: Callable[..., Any] | None = None) -> str:
    """Returns the innermost place outside of libraries; without one that of `method`, which was
    called, else the innermost.

    The file's name alone: messages are kept with rollouts, without the user's folders.
    """
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].co_filename.startswith(LIBRARIES)]
    called = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    if not own and called is not None:
        own = [(called, called.co_firstlineno)]
    if not (own or frames):
        return ""
    return shown_place(*(own or frames)[-1])


def shown_place(code: CodeType, line: int) -> str:
    return f"({Path(code.co_filename).name}:{line}, in {code.co_qualname})."
