"""Reads an agent's request, and turns it into the body that the engine is sent.

Only fields of the API's table go on (`dialects/base.py`); others are ignored, and the calls say so,
or refused. The run may pass on more (`tokens.extra_fields`), and decides how agents may constrain
what is sampled (`tokens.constraints`).

The run alone decides the distribution that tokens are sampled from: its temperature and top_p are
sent whatever the agent asks for, every other sampler setting is sent switched off. What the agent's
protocol needs (stop, tools, seed, formats) is kept, except for `parallel_tool_calls` of free calls:
vLLM would mask what is sampled.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import orjson
from envserver_records.cleaning import clean
from envserver_records.errors import InputError
from envserver_records.records import Message

from ..settings.config import TokensConfig
from ..tokens.images import facts_of_all, urls_of
from .asgi import Scope, header
from .bounds import InFlight
from .dialects import DialectAdapter, Memory
from .dialects.base import (
    KIBIBYTE,
    TOKEN_ID,
    TOKENS,
    Check,
    FieldTable,
    ModelRequest,
    bad,
    bounded_object,
    either,
    flag,
    is_ignored,
    is_off,
    items,
    number,
    text,
    whole,
)
from .dialects.conversation import check_images, check_media
from .engine_client.base import is_strict

# Engines mask the distribution before they take logprobs, so those of a constrained call are not
# the model's own: it is flagged `structured_output_masked`, its tokens are masked by default and
# never compared with the model's.

_GRAMMAR_BYTES = 256 * KIBIBYTE
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_FORMS = (None, "text", "json_object", "json_schema")
_LARGEST_COUNT = 10_000
_MOST_REPEATS = 1000
"""Counts of all patterns of a request together: xgrammar's time grows with their square."""
_TOO_HARD = (
    f"nests repetitions, or all patterns together repeat more than {_MOST_REPEATS} times: "
    "rewrite it; if this run's agents need it, run with --tokens.constraints all"
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REGEX_WORD = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{\d+,?\d*\}|\{,\d+\}|.", re.S)
"""An escape, a class, a count or a single character. It always matches, so it takes linear time."""
_WORDS = items(KIBIBYTE, text(KIBIBYTE))


def _bias(value: Any, place: str) -> None:
    bounded_object(64 * KIBIBYTE)(value, place)
    for token, amount in value.items():
        if not token.isdecimal():
            raise bad(f"{place}.{token[:80]}", "must be a token id")
        number(-100, 100)(amount, f"{place}.{token}")


RAW: dict[str, Check] = {
    "structured_outputs": bounded_object(_GRAMMAR_BYTES),
    "guided_json": either(text(_GRAMMAR_BYTES), bounded_object(_GRAMMAR_BYTES)),
    "guided_regex": text(_GRAMMAR_BYTES),
    "guided_choice": _WORDS,
    "guided_grammar": text(_GRAMMAR_BYTES),
    "logit_bias": _bias,
    "bad_words": _WORDS,
    "allowed_token_ids": items(300_000, TOKEN_ID),
    "min_tokens": whole(0, 2**31 - 1),
    "ignore_eos": flag,
    "thinking_token_budget": TOKENS,
}
"""Fields that only an engine knows, allowed with `tokens.constraints` all."""


def constraints_of(fields: dict[str, Any], tools: list[dict[str, Any]]) -> list[str]:
    """Returns the places in a chat request that constrain sampling."""
    places = [name for name in RAW if fields.get(name)]
    places += [f"tools[{n}].function.strict" for n, tool in enumerate(tools) if is_strict(tool)]
    choice = fields.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        places.append("tool_choice")
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        places.append("response_format")
    return places


def without_strict(request: ModelRequest) -> ModelRequest:
    """Returns `request` with tools that are not strict, if nothing else constrains it.

    Without the grammar the tokens of a call are the model's own, and so are its mistakes.
    """
    strict = [tool for tool in request.tools if is_strict(tool)]
    if not strict or len(constraints_of(request.fields, request.tools)) > len(strict):
        return request
    tools = [
        {**tool, "function": {**tool["function"], "strict": False}} if is_strict(tool) else tool
        for tool in request.tools
    ]
    return msgspec.structs.replace(request, tools=tools, strict_dropped=True)


def check_references(fields: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    forms = ("response_format", *RAW)
    places: dict[str, Any] = {name: fields[name] for name in forms if name in fields}
    places["tools"] = tools
    written = orjson.dumps(places)  # few schemas have references, and walking takes its time
    if any(name.encode() in written for name in _REFERENCES):
        for place, value in places.items():
            _check_references(value, place)


def _check_references(value: Any, place: str) -> None:
    for name, item in value.items() if isinstance(value, dict) else ():
        at = f"{place}.{name[:80]}"
        if name in _REFERENCES and isinstance(item, str) and not item.startswith("#"):
            raise bad(at, "must begin with #: no schema is loaded over the network")
        _check_references(item, at)
    for index, item in enumerate(value if isinstance(value, list) else ()):
        _check_references(item, f"{place}[{index}]")


def check_constraints(
    fields: dict[str, Any], tools: list[dict[str, Any]], allowed: Literal["none", "forms", "all"]
) -> None:
    """Checks what constrains a chat request; `RAW` fields were checked before."""
    places = constraints_of(fields, tools)
    if not places:
        return
    if allowed == "none":
        raise not_allowed(places[0], "forms")
    form = fields.get("response_format") or {}
    if allowed == "forms" and form.get("type") not in _FORMS:
        raise not_allowed("response_format.type", "all")
    size = 0
    repeats = 0.0
    for schema, place in _schemas(fields, tools):
        size += len(orjson.dumps(schema))
        if size > _GRAMMAR_BYTES:
            raise bad(place, f"makes the schemas larger than {_GRAMMAR_BYTES} bytes of JSON")
        if allowed == "forms":
            for pattern, at in _patterns(schema, place):
                repeats += _repeats(pattern)
                if repeats > _MOST_REPEATS:
                    raise bad(at, _TOO_HARD)


def not_allowed(place: str, needed: str) -> InputError:
    return InputError(
        f"{place} is not allowed: it would constrain what is sampled. Leave it out; if this run's"
        f" agents need it, run with --tokens.constraints {needed}.",
        place=place,
    )


def _schemas(fields: dict[str, Any], tools: list[dict[str, Any]]) -> Iterator[tuple[Any, str]]:
    yield fields.get("response_format"), "response_format"
    forced = fields.get("tool_choice") not in (None, "auto", "none")
    for index, tool in enumerate(tools):
        if forced or is_strict(tool):
            yield tool.get("function"), f"tools[{index}].function"


def _patterns(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    for name, value in schema.items() if isinstance(schema, dict) else ():
        at = f"{place}.{name[:80]}"
        if name in _COUNTS and isinstance(value, int | float) and value > _LARGEST_COUNT:
            raise bad(at, f"must be at most {_LARGEST_COUNT} where a schema is enforced")
        if name == "pattern" and isinstance(value, str):
            yield value, at
        if name == "patternProperties" and isinstance(value, dict):
            yield from ((pattern, at) for pattern in value)
        yield from _patterns(value, at)
    for index, value in enumerate(schema if isinstance(schema, list) else ()):
        yield from _patterns(value, f"{place}[{index}]")


def _repeats(pattern: str) -> float:
    """Returns the sum of the counts in `pattern`, which engines write out one by one.

    Infinity if a group that repeats something is repeated.
    """
    total = 0.0
    repeats = [False]
    """For each open group, outermost first: whether it contains a repetition."""
    closed = False
    """Whether the last atom is a group that contains a repetition."""
    for word in _REGEX_WORD.findall(pattern):
        least, most = _times(word)
        if most > 1:
            if closed:
                return math.inf
            total += least if math.isinf(most) else most
            repeats[-1] = True
        elif word == "(":
            repeats.append(False)
        elif word == ")" and len(repeats) > 1:
            closed = repeats.pop()
            repeats[-1] = repeats[-1] or closed
            continue
        closed = closed and word == "?"
    return total


def _times(word: str) -> tuple[float, float]:
    """Returns how often `word` repeats what is before it, at least and at most."""
    if word in ("*", "+"):
        return 0, math.inf
    if not word.startswith("{") or word == "{":
        return 1, 1
    least, comma, most = word[1:-1].partition(",")
    if comma and not most:
        return float(least), math.inf
    return float(least or 0), min(float(most or least), sys.float_info.max)


_SAMPLERS_OFF: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_SAMPLING = (
    "temperature",
    "top_p",
    *_SAMPLERS_OFF,
    *RAW,
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "seed",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
)
_LEAST_BIAS = -100.0
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class EngineBody(msgspec.Struct, kw_only=True):
    """The body of a chat (or text completion) request, completed by `with_max_tokens`."""

    body: dict[str, Any]
    tokens_field: str
    flags: list[str]

    def with_max_tokens(self, max_tokens: int | None) -> None:
        if max_tokens is None:
            return
        self.body[self.tokens_field] = max_tokens
        least = self.body.get("min_tokens")
        if isinstance(least, int) and least > max_tokens:
            self.body["min_tokens"] = max_tokens

    def sampling(self) -> dict[str, Any]:
        return {name: self.body[name] for name in _SAMPLING if name in self.body}


def engine_body(
    request: ModelRequest,
    *,
    model: str,
    sampling: dict[str, Any],
    exact: bool,
    banned: tuple[int, ...] = (),
) -> EngineBody:
    """Builds the engine's body for `request`.

    Args:
        sampling: the run's `temperature` and `top_p`.
        exact: whether the engine returns token ids and logprobs on demand.
        banned: tokens that must not be sampled: placeholders with no image behind them.
    """
    body = {**request.fields, "model": model}
    if exact:
        body.update(_SAMPLERS_OFF)
        body["return_token_ids"] = True
    for name in ("temperature", "top_p"):
        if name in sampling:
            body[name] = sampling[name]
    if request.prompt is None:
        body["messages"] = _renderable(request.messages)
        if request.tools:
            body["tools"] = request.tools
        if exact or request.wants_logprobs:
            body["logprobs"] = True
        if exact and "include_reasoning" in body:
            body["include_reasoning"] = True
    else:
        body["prompt"] = request.prompt
        if exact:
            body.setdefault("logprobs", 0)
    flags = _flags(request, body)
    if exact and "structured_output_masked" not in flags:
        body.pop("parallel_tool_calls", None)
    if banned:
        never = {str(token): _LEAST_BIAS for token in banned}
        body["logit_bias"] = {**(body.get("logit_bias") or {}), **never}
    return EngineBody(body=body, tokens_field=request.tokens_field, flags=flags)


def _flags(request: ModelRequest, body: dict[str, Any]) -> list[str]:
    flags = []
    if body.get("top_p", 1.0) != 1.0:
        flags.append("top_p_active")
    if constraints_of(body, body.get("tools") or []):
        flags.append("structured_output_masked")
    if request.strict_dropped:
        flags.append("strict_dropped")
    if request.unchecked:
        flags.append("unchecked_fields")
    if request.ignored:
        flags.append("fields_ignored")
    return flags


def _renderable(messages: list[Message]) -> list[Message]:
    """Returns `messages` without half surrogate pairs in the arguments of their calls.

    A model can write `"\\udabc"` in them, which is JSON; an engine that decodes the arguments for
    the chat template cannot encode what it gets, and refuses the whole conversation.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if not _SURROGATE.search("\n".join(filter(None, map(_arguments, calls)))):
        return [*messages]
    return [
        {**message, "tool_calls": [*map(_renderable_call, message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _arguments(call: dict[str, Any]) -> str | None:
    arguments = (call.get("function") or {}).get("arguments")
    return arguments if isinstance(arguments, str) else None


def _renderable_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments(call)
    if arguments is None or not _SURROGATE.search(arguments):
        return call
    try:
        value, changes = clean(json.loads(arguments))
    except (ValueError, RecursionError):
        return call  # no engine can decode it either
    if not changes:
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(value)}}


_DEFAULT = TokensConfig()
_READ = ("messages", "input", "prompt", "system")
_MOST_NOTED = 16
_EMPTY: tuple[Any, ...] = ("", [], {})


class _Fields(NamedTuple):
    """A request's fields for the dialect, for the engine as they are, and names of ignored ones."""

    known: dict[str, Any]
    passed: dict[str, Any]
    ignored: list[str]


def read_request(
    dialect: DialectAdapter,
    body: dict[str, Any],
    memory: Memory,
    tokens: TokensConfig = _DEFAULT,
) -> ModelRequest:
    """Reads a decoded request body within what the run allows (`tokens`)."""
    fields = _Fields({}, {}, [])
    for name, value in body.items():
        if value is not None:
            _sort(dialect.table, name, value, fields, tokens)
    request = dialect.read(fields.known, memory)
    request.fields |= fields.passed
    request.unchecked = not fields.passed.keys() <= RAW.keys()
    request.ignored = fields.ignored[:_MOST_NOTED]
    check_media(request.messages, tokens)
    check_references(request.fields, request.tools)
    check_constraints(request.fields, request.tools, tokens.constraints)
    for name in _READ:
        fields.known.pop(name, None)  # a retry's answer needs the rest only
    return request


async def admit_images(messages: list[Message], tokens: TokensConfig, in_flight: InFlight) -> None:
    check_images(await facts_of_all(urls_of(messages), in_flight.reading), tokens)


def _sort(table: FieldTable, name: str, value: Any, fields: _Fields, tokens: TokensConfig) -> None:
    """Checks one field and puts it where it belongs; one that switches nothing on is left out."""
    check = table.read.get(name) or table.engine.get(name)
    if check is not None:
        check(value, name)
        if name in table.read or value not in _EMPTY:
            fields.known[name] = value
    elif name in table.dropped and name not in tokens.extra_fields:
        return
    elif name in table.refused:
        if not is_off(name, value):
            raise bad(name, f"is not supported: {table.refused[name]}")
    elif name in RAW:
        if is_off(name, value):
            return
        if tokens.constraints != "all":
            raise not_allowed(name, "all")
        RAW[name](value, name)
        fields.passed[name] = value
    elif name in tokens.extra_fields:
        fields.passed[name] = value
    elif is_ignored(name):
        fields.ignored.append(name[:80])
    else:
        name = name[:80]
        raise InputError(
            f"{name} is not among the fields that an agent may send. Leave it out; if this run's"
            f" agents need it, run with --tokens.extra_fields {name}.",
            place=name,
        )


# Coding programs differ from other agents in two ways. A conversation of theirs only grows, so an
# equal request right after an answer is a retry, which they do not mark. And they ask for titles
# and summaries beside their conversation (see `retries.SideCalls`).

_NAMES = ("claude-cli/", "codex", "opencode/", "qwencode/")


def is_program(scope: Scope) -> bool:
    return header(scope, b"user-agent").lower().startswith(_NAMES)
