"""Makes a tool of a typed function: `@tool`.

A wrong argument and a `ToolError` are shown to the model; any other exception of the function is a
bug of the environment (an `AgentError`, reported once), except those of envserver (limits, engines,
sandboxes) and `OSError`, which pass as they are.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Annotated, Any, get_type_hints, overload

import msgspec
from envserver_records.errors import AgentError

from .calling import MAX_RESULT_CHARACTERS, Tool, ToolError, is_bug

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note):")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SHOWN = ("Returns", "Example", "Examples", "Note")
"""Sections that a model reads, too."""


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the text for the model, and the descriptions of arguments."""
    section, shown, described = "", [], []
    for line in text.splitlines():
        head = _SECTION.fullmatch(line.rstrip())
        section = head[1] if head else section
        if section in ("Args", "Arguments", "Parameters"):
            described += [] if head else [line]
        elif section == "" or section in _SHOWN:
            shown.append(line.rstrip())
    return "\n".join(shown).strip(), _argument_texts(described)


def _argument_texts(lines: list[str]) -> dict[str, str]:
    """Reads `name: text`; lines that are indented further continue the text."""
    arguments: dict[str, str] = {}
    indent, last = None, ""
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        begun = _ARGUMENT.fullmatch(line.strip()) if depth <= indent else None
        if begun:
            last = begun[1]
            arguments[last] = begun[2]
        elif last:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return arguments


CALLER = "caller"
"""The parameter of a tool on the server that gets the `Caller`; the model does not see it."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_PLAIN = (str, int, float, bool, Enum, type(None))


@dataclass(frozen=True)
class TypedTool(Tool):
    original: Callable[..., Any] = lambda: None
    arguments: type[msgspec.Struct] = msgspec.Struct

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.original(*args, **named)

    @property
    def is_async(self) -> bool:
        return _is_async(self.original)

    def __get__(self, instance: Any, owner: Any = None) -> TypedTool:
        if instance is None:
            return self
        bound = partial(self.original, instance)
        return replace(self, original=bound, function=_showing(self.name, bound))

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            values = msgspec.convert(arguments, self.arguments)
        except (msgspec.ValidationError, RecursionError) as error:
            reason = str(error).replace("`$.", "`").replace("Object ", "")
            raise ToolError(f"the arguments of {self.name} are not valid: {reason}.") from error
        return {name: getattr(values, name) for name in self.arguments.__struct_fields__}


@overload
def tool(function: Callable[..., Any], /) -> TypedTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    max_characters: int = MAX_RESULT_CHARACTERS,
    parallel: bool = False,
    on_server: bool = False,
) -> Callable[[Callable[..., Any]], TypedTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    max_characters: int = MAX_RESULT_CHARACTERS,
    parallel: bool = False,
    on_server: bool = False,
) -> Any:
    """Makes a tool of a function or method, plain or `async`.

    Types may be str, int, float, bool, Literal, Enum, list, dict, Optional, dataclasses and msgspec
    structs. Describe a parameter in the docstring's `Args:`, or as `Annotated[int, "how many"]`;
    `Annotated[str, msgspec.Meta(max_length=500)]` limits it. A str is returned to the model as it
    is, anything else as JSON. A plain function must not wait: it runs on the event loop.

    Args:
        name: unset: the function's.
        description: unset: the docstring without its `Args:` and `Raises:`.
        max_characters: longer results are cut.
        parallel: lets adjacent calls in one message run at the same time, if it is `async`.
        on_server: a method of an environment that runs in the server (keys, network, the hidden
            part of the task); its parameter `caller: Caller` gets the rollout. A plain function
            runs in a thread there.

    Raises:
        TypeError: a type or the description is missing, or cannot be given to a model.
    """

    def typed(function: Callable[..., Any]) -> TypedTool:
        named = str(name or getattr(function, "__name__", ""))
        if not _NAME.fullmatch(named):
            raise TypeError(
                f"{named!r} is not a name for a tool: letters, digits, _ and -, up to 64."
            )
        text, texts = parse_docstring(inspect.getdoc(function) or "")
        text = text if description is None else description
        if not text:
            lost = " Python removed it (-OO)." if sys.flags.optimize > 1 else ""
            raise TypeError(
                f"The tool {named!r} needs a docstring: the model reads what it does.{lost}"
            )
        struct = _arguments(named, function, texts, hides_caller=on_server)
        described = {"name": named, "description": text, "parameters": schema_of(struct)}
        return TypedTool(
            {"type": "function", "function": described},
            _showing(named, function),
            max_characters,
            parallel=parallel and inspect.iscoroutinefunction(function),
            on_server=on_server,
            original=function,
            arguments=struct,
        )

    return typed if function is None else typed(function)


def as_tool(given: Tool | Callable[..., Any]) -> Tool:
    return given if isinstance(given, Tool) else tool(given)


def result_text(result: Any) -> str:
    """Returns a tool's result as the model reads it: a text as it is, anything else as JSON."""
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _showing(name: str, function: Callable[..., Any]) -> Callable[..., str | Awaitable[str]]:
    """Wraps `function`: its result becomes text, and its bugs are typed."""

    def shown(**arguments: Any) -> str:
        try:
            return result_text(function(**arguments))
        except Exception as error:
            raise _meaning(name, error) from error

    async def shown_later(**arguments: Any) -> str:
        try:
            return result_text(await function(**arguments))
        except Exception as error:
            raise _meaning(name, error) from error

    return shown_later if _is_async(function) else shown


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function.func if isinstance(function, partial) else function)


def _meaning(name: str, error: Exception) -> Exception:
    if not is_bug(error):
        return error
    return AgentError(f"The tool {name!r} raised {type(error).__name__}: {error}", bug="tool")


def _arguments(
    name: str, function: Callable[..., Any], described: dict[str, str], *, hides_caller: bool
) -> type[msgspec.Struct]:
    """Returns the struct of a function's arguments, with the texts of `described`."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"A type of the tool {name!r} is not known: {error}.") from error
    fields: list[Any] = []
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    for parameter in parameters:
        if hides_caller and parameter.name == CALLER:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"The tool {name!r} takes {parameter}: a model names each argument.")
        if parameter.name not in hints:
            raise TypeError(f"The parameter {parameter.name!r} of the tool {name!r} needs a type.")
        type_ = _described(hints[parameter.name], described.get(parameter.name))
        fields.append((parameter.name, type_, *_default(parameter.default)))
    if unknown := described.keys() - {parameter.name for parameter in parameters}:
        raise TypeError(f"The docstring of {name!r} describes {sorted(unknown)}, which it lacks.")
    try:
        struct = msgspec.defstruct(
            f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        msgspec.json.schema(struct)
    except (TypeError, ValueError) as error:
        raise TypeError(f"The tool {name!r} has a type that JSON cannot hold: {error}") from error
    return struct


def _default(value: Any) -> tuple[Any, ...]:
    if value is inspect.Parameter.empty:
        return ()
    return (
        (value,) if isinstance(value, _PLAIN) else (msgspec.field(default_factory=lambda: value),)
    )


def _described(hint: Any, description: str | None) -> Any:
    """Adds a description to a type: that of `Annotated[type, "..."]`, else the docstring's."""
    metadata: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    own = [note for note in metadata if isinstance(note, str)]
    text = own[0] if own else description
    bare = hint.__origin__ if metadata else hint
    limits = [note for note in metadata if isinstance(note, msgspec.Meta)]
    for limit in (*limits, *([msgspec.Meta(description=text)] if text else [])):
        bare = Annotated[bare, limit]
    return bare


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the JSON schema of arguments.

    Only recursive types stay references: a chat template shows the schema to the model as it is.
    """
    (top,), definitions = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    schema: dict[str, Any] = _inlined(top, definitions, ())
    schema.pop("title", None)
    text = msgspec.json.encode(schema).decode()
    if any(f'#/$defs/{name}"' in text for name in definitions):
        schema["$defs"] = definitions
    return schema


def _inlined(schema: Any, definitions: dict[str, Any], within: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in within:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        inner = _inlined(definitions[name], definitions, (*within, name))
        inner.pop("title", None)
        return {**inner, **rest}
    return {key: _inlined(value, definitions, within) for key, value in schema.items()}
