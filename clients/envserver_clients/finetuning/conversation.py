"""Reads a row as a conversation, or as plain text with a completion, or as recorded tokens.

Rows are those of `envserver export --to messages` or `--to dpo`, of `envserver sft build`, or have
a `prompt` and a `completion`. Invariant: arguments of tool calls are objects, as chat templates
need them, even if the row has them as JSON text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envserver_records import ConfigError, InputError
from envserver_records.extras import CLIENTS, install_command
from envserver_records.files import sha256_of
from envserver_records.tasks import Json

Row = dict[str, Any]

_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")


@dataclass(frozen=True)
class Part:
    """The files of one model's rows. `tool`: of `envserver sft build`; None: no single tool."""

    tool: str | None
    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def parts_of(data: Path, *, tool: str | None = None, whole: bool = False) -> list[Part]:
    by_tool = _parts_by_tool(data) if data.is_dir() else []
    if by_tool and tool is None:
        return [_joined(by_tool)] if whole else by_tool
    if tool is not None:
        found = [part for part in by_tool if part.tool == tool]
        there = ", ".join(str(part.tool) for part in by_tool) or "no tools"
        if not found:
            raise ConfigError(f"{data} has no rows of the tool {tool}: it has {there}.")
        return found
    return [_part_of(data)]


def _parts_by_tool(folder: Path) -> list[Part]:
    return [
        Part(directory.name, train, _split(directory, *_VALIDATION))
        for directory in sorted(folder.iterdir())
        if directory.is_dir() and (train := _split(directory, _TRAIN))
    ]


def _joined(parts: Sequence[Part]) -> Part:
    train = tuple(path for part in parts for path in part.train)
    return Part(None, train, tuple(path for part in parts for path in part.validation))


def _part_of(data: Path) -> Part:
    if data.is_file():
        return Part(None, (data,), ())
    if not data.is_dir():
        raise ConfigError(f"{data} is neither a file nor a folder.")
    if train := _split(data, _TRAIN):
        return Part(None, train, _split(data, *_VALIDATION))
    shards = tuple(path for path in sorted(data.iterdir()) if path.name.endswith(_SUFFIXES))
    if not shards:
        raise ConfigError(
            f"{data} does not contain rows.",
            hint=f"It must have files ending in {', '.join(_SUFFIXES)}, or folders with "
            "train.jsonl.",
        )
    return Part(None, shards, ())


def _split(folder: Path, *names: str) -> tuple[Path, ...]:
    places = (folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES)
    return tuple(path for path in places if path.is_file())


def rows_of(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """Yields rows with their places, such as `train.jsonl, line 7`."""
    for path in paths:
        yield from _parquet(path) if path.suffix == ".parquet" else _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _object(line, place)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{place}: a row must be a JSON object, not {type(row).__name__}.")
    return row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "Parquet is read with pyarrow.", hint=install_command("train", CLIENTS)
        ) from error
    try:
        number = 0
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def digest_of(paths: Sequence[Path]) -> str:
    """The sha256 of the files' contents, in order; their names do not matter."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


Message = dict[str, Any]
Tools = list[Json]
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Conversation:
    """A chat. `given`: number of messages at the beginning that are never trained."""

    messages: list[Message]
    given: int = 0
    tools: Tools | None = None


@dataclass(frozen=True)
class Plain:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """Exact token ids, as the proxy recorded them, and which of them the model sampled."""

    ids: list[int]
    sampled: list[bool]


@dataclass(frozen=True)
class Pair:
    chosen: Conversation
    rejected: Conversation


def read_row(
    row: Row, place: str, *, plain: Any = None, recorded: bool = False
) -> Conversation | Plain | Tokens:
    """Reads a row for supervised training.

    `plain` decides whether a text prompt is used as it is; None: never. `recorded`: read `tokens`
    and `mask` instead of messages.
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
    Without a prompt, the common beginning of chosen and rejected is the prompt."""
    if missing := [name for name in ("chosen", "rejected") if name not in row]:
        raise InputError(f"{place}: a pair must have chosen and rejected; {missing[0]} is missing.")
    chosen = _turns(row, "chosen", "assistant", place)
    rejected = _turns(row, "rejected", "assistant", place)
    if "prompt" in row:
        before = _turns(row, "prompt", "user", place)
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
        and all(type(token) is int and token >= 0 for token in ids)
        and all(isinstance(flag, bool) or flag in (0, 1) for flag in mask)
    )
    if not fits:
        raise InputError(
            f"{place}: recorded tokens must be token ids, and mask as many flags.",
            hint="`envserver export --to parquet` writes such rows.",
        )
    return Tokens(ids, [bool(flag) for flag in mask])


def _asked(prompt: str, completion: str) -> Conversation:
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    return Conversation(messages, 1)


def _turns(row: Row, name: str, role: str, place: str) -> list[Message]:
    if isinstance(row[name], str):
        return [{"role": role, "content": row[name]}]
    return _messages(row[name], name, place)


def _alike(first: Sequence[Message], second: Sequence[Message]) -> int:
    count = 0
    for message, other in zip(first, second, strict=False):
        if message != other:
            break
        count += 1
    return count


def _messages(value: Any, name: str, place: str) -> list[Message]:
    if not isinstance(value, list):
        raise InputError(f"{place}: {name} must be a list of messages.")
    return [_message(item, f"{place}: {name}[{number}]") for number, item in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise InputError(f"{place} does not have a role.")
    message = {key: field for key, field in value.items() if field is not None or key == "content"}
    message.setdefault("content", None)
    if message["content"] is None and value["role"] != "assistant":
        message["content"] = ""
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_object(call, place) for call in calls]
    return message


def _with_object(call: Any, place: str) -> Json:
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
    name: str
    arguments: Mapping[str, Any]


def calls_in(text: str) -> list[Call]:
    """The calls in a text, in order: JSON objects with a name and arguments, as chat templates
    write them (`<tool_call>{...}`, a list after `[TOOL_CALLS]`, bare objects)."""
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
    """Whether there is a call, and all name an offered tool with arguments that fit its JSON
    schema. Without tools, any call is valid."""
    if tools is None:
        return bool(calls)
    schemas = {
        function["name"]: function.get("parameters") or {}
        for function in map(_function, tools)
        if function
    }
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


def _function(tool: Any) -> Json | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) and "name" in function else None


def _fits(arguments: Mapping[str, Any], schema: Any) -> bool:
    from jsonschema import exceptions, validators

    try:
        kind = validators.validator_for(schema)
        return bool(kind(schema).is_valid(arguments))
    except exceptions.SchemaError:
        return True  # the tool's own fault
