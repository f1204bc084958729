"""Reads a row as a conversation, or as plain text with a completion.

In: rows of `envserver export --to messages` or `--to dpo`, of `envserver sft build`, or with a
`prompt` and a `completion`, or with recorded tokens. Out: `Conversation` (messages, of which the
first ones are not trained), `Plain` or `Tokens`. What always holds: arguments of tool calls are
objects, as chat templates need them, even if the row has them as JSON text. `calls_in` reads the
calls that a model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envserver_records import InputError

from .data import Row

Message = dict[str, Any]
Tools = list[dict[str, Any]]
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Conversation:
    """The messages of a chat.

    Args:
        messages: all messages.
        given: number of messages at the beginning that are never trained.
        tools: the tools offered to the model; None: none.
    """

    messages: list[Message]
    given: int = 0
    tools: Tools | None = None


@dataclass(frozen=True)
class Plain:
    """A text and its completion."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """Exact token ids, as the proxy recorded them, and which of them the model sampled."""

    ids: list[int]
    sampled: list[bool]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Conversation
    rejected: Conversation


def read_row(
    row: Row, place: str, *, plain: Any = None, recorded: bool = False
) -> Conversation | Plain | Tokens:
    """Reads a row for supervised training.

    Args:
        place: the row's place, for errors.
        plain: decides whether a text prompt is used as it is; None: never.
        recorded: read `tokens` and `mask` instead of messages.

    Raises:
        InputError: the row has none of the known forms.
    """
    if recorded:
        return _tokens(row.get("tokens"), row.get("mask"), place)
    if "messages" in row:
        return Conversation(_messages(row["messages"], "messages", place), 0, _tools(row, place))
    if "instruction" in row and "output" in row:
        prompt, completion = row["instruction"], row["output"]
    elif "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
    else:
        raise InputError(
            f"{place}: a row needs messages, or prompt and completion, or instruction and output; "
            f"this one has {', '.join(map(str, row)) or 'nothing'}."
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if plain is not None and plain(prompt):
            return Plain(prompt, completion)
        return _asked(prompt, completion)
    before = _messages(prompt, "prompt", place)
    after = _messages(completion, "completion", place)
    return Conversation([*before, *after], len(before), _tools(row, place))


def read_pair(row: Row, place: str) -> Pair:
    """Reads a row for preference training: prompt, chosen and rejected, each messages or text.
    Without a prompt, the common beginning of chosen and rejected is the prompt.
    Raises InputError: the row has another form, or its answers do not differ.
    """
    if missing := [name for name in ("chosen", "rejected") if name not in row]:
        raise InputError(f"{place}: a pair must have chosen and rejected; {missing[0]} is missing.")
    chosen = _answer(row["chosen"], "chosen", place)
    rejected = _answer(row["rejected"], "rejected", place)
    if "prompt" in row:
        before = _prompt(row["prompt"], place)
    else:
        before = chosen[: _alike(chosen, rejected)]
        chosen, rejected = chosen[len(before) :], rejected[len(before) :]
    if not chosen or not rejected or chosen == rejected:
        raise InputError(f"{place}: chosen and rejected are the same, or one is empty.")
    tools = _tools(row, place)
    given = len(before)
    return Pair(
        Conversation([*before, *chosen], given, tools),
        Conversation([*before, *rejected], given, tools),
    )


def _tokens(ids: Any, mask: Any, place: str) -> Tokens:
    fits = (
        isinstance(ids, list)
        and isinstance(mask, list)
        and len(ids) == len(mask)
        and all(type(one) is int and one >= 0 for one in ids)
        and all(isinstance(one, bool) or one in (0, 1) for one in mask)
    )
    if not fits:
        raise InputError(
            f"{place}: recorded tokens must be token ids, and mask as many flags.",
            hint="`envserver export --to parquet` writes such rows.",
        )
    return Tokens(ids, [bool(one) for one in mask])


def _asked(prompt: str, completion: str) -> Conversation:
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    return Conversation(messages, 1)


def _answer(value: Any, name: str, place: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages(value, name, place)


def _prompt(value: Any, place: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return _messages(value, "prompt", place)


def _alike(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Returns the number of messages that both begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _messages(value: Any, name: str, place: str) -> list[Message]:
    if not isinstance(value, list):
        raise InputError(f"{place}: {name} must be a list of messages.")
    return [_message(one, f"{place}: {name}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise InputError(f"{place} does not have a role.")
    message = {key: one for key, one in value.items() if one is not None or key == "content"}
    message.setdefault("content", None)
    if message["content"] is None and value["role"] != "assistant":
        message["content"] = ""
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_object(call, place) for call in calls]
    return message


def _with_object(call: Any, place: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object."""
    try:
        function = call["function"]
        arguments = function["arguments"]
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{place}: a tool call must have a function with name and arguments."
        ) from error
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return dict(call)  # the model's own text, invalid as it is
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(row: Row, place: str) -> Tools | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise InputError(f"{place}: tools are not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{place}: tools must be a list.")
    return tools


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


def calls_in(text: str) -> list[Call]:
    """Returns the calls in a text, in order: JSON objects with a name and arguments, as chat
    templates write them (`<tool_call>{...}`, a list after `[TOOL_CALLS]`, bare objects).
    """
    decoder = json.JSONDecoder()
    found: list[Call] = []
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            call = _call(value)
            found += [call] if call else []
            end = max(end, place + 1)
        place = text.find("{", end)
    return found


def are_valid(calls: list[Call], tools: Tools | None) -> bool:
    """Returns whether there is a call, and all name an offered tool with arguments that fit its
    JSON schema. Without tools, any call is valid."""
    if tools is None:
        return bool(calls)
    schemas = {one["name"]: one.get("parameters") or {} for one in map(_function, tools) if one}
    return bool(calls) and all(
        call.name in schemas and _fits(call.arguments, schemas[call.name]) for call in calls
    )


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    arguments = next((value[name] for name in _ARGUMENTS if name in value), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return Call(value["name"], arguments)


def _function(tool: Any) -> dict[str, Any] | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) and "name" in function else None


def _fits(arguments: Mapping[str, Any], schema: Any) -> bool:
    from jsonschema import exceptions, validators

    try:
        kind = validators.validator_for(schema)
        return bool(kind(schema).is_valid(arguments))
    except exceptions.SchemaError:
        return True  # the tool's own fault
