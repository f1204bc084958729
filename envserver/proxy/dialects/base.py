"""The interface of a dialect, and the checks and fields that dialects share. Pure.

To add a dialect, implement DialectAdapter and list it in `DIALECTS`. A table per API has the fields
that an agent may send, with type and bounds, and what becomes of each. Others are treated alike in
all APIs (`is_ignored`): ignored, and the calls say so, or refused by name unless the run passes
them on (`tokens.extra_fields`). A null counts as not sent. Objects for the engine are built anew
from known fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson
from envserver_records.errors import EnvserverError, InputError
from envserver_records.records import Dialect, Message

from ...tokens.prepare import RESERVED
from ..asgi import error_body


class ModelRequest(msgspec.Struct, kw_only=True):
    """One request of an agent in the common form, which is that of OpenAI's chat API.

    Args:
        body: the fields of the request body that the dialect knows, as received.
        messages, tools: in OpenAI's chat format; no messages for a text completion.
        prompt: for a text completion its text, its token ids, or a list of either; else None.
        fields: further fields for the engine, under their names in its chat API: stop, seed, n,
            tool_choice, response_format, top_logprobs, ...
        wanted_tokens: the agent's own limit per choice, or None.
        tokens_field: the name of that limit in the engine's request.
        unchecked: whether `fields` holds some that the run passes on unchecked.
        ignored: names of the agent's fields that have no effect here.
        wants_*: what the agent wants its answer to show.
    """

    dialect: Dialect
    body: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: Any = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    choices: int = 1
    wanted_tokens: int | None = None
    tokens_field: str = "max_tokens"
    stream: bool = False
    wants_usage: bool = True
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_reasoning: bool = True
    unchecked: bool = False
    ignored: list[str] = msgspec.field(default_factory=list)
    strict_dropped: bool = False
    may_be_side: bool = False


def objects(body: dict[str, Any], name: str, *, needed: bool = False) -> list[dict[str, Any]]:
    """Returns the list of objects in field `name`, or []; refuses [] if it is `needed`."""
    values = body.get(name)
    if not needed and not values:
        return []
    if not isinstance(values, list) or (needed and not values):
        raise bad(name, "must be a list of at least one item" if needed else "must be a list")
    if not all(isinstance(value, dict) for value in values):
        raise bad(name, "must only hold objects")
    return values


def bad(name: str, what: str) -> InputError:
    return InputError(f"{name} {what}.", place=name)


def unsupported(kind: Any, place: str, why: str = "") -> InputError:
    return bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported{why}")


def impossible(value: Any, place: str) -> InputError:
    return bad(place, f"cannot be {str(value)[:80]!r}")


def string(holder: dict[str, Any], name: str, place: str = "") -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad(_path(place, name), "must be a text")
    return value


def mapping(holder: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(_path(place, name), "must be an object")
    return value


def boolean(holder: dict[str, Any], name: str, place: str = "") -> bool | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(_path(place, name), "must be true or false")
    return value


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


# A check is called with a value (never None) and its place, and raises InputError.

Check = Callable[[Any, str], None]

KIBIBYTE = 1024
_INT64 = 2**63
LARGEST_INT32 = 2**31 - 1


def whole(least: int, most: int) -> Check:
    limit = "" if most >= LARGEST_INT32 else f" and at most {most}"

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise bad(place, f"must be a whole number of at least {least}{limit}")

    return check


def number(least: float, most: float) -> Check:
    def check(value: Any, place: str) -> None:
        if (
            type(value) not in (int, float)
            or not least <= value <= most
            or not math.isfinite(value)
        ):
            raise bad(place, f"must be a number from {least:g} to {most:g}")

    return check


def flag(value: Any, place: str) -> None:
    if not isinstance(value, bool):
        raise bad(place, "must be true or false")


def text(longest: int) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, str):
            raise bad(place, "must be a text")
        if len(value) > longest:
            raise bad(place, f"must have at most {longest} characters")

    return check


def items(most: int, each: Check | None = None) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise bad(place, "must be a list")
        if len(value) > most:
            raise bad(place, f"must have at most {most} items")
        for index, item in enumerate(value if each else ()):
            assert each is not None
            each(item, f"{place}[{index}]")

    return check


def bounded_object(size: int) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise bad(place, "must be an object")
        if len(orjson.dumps(value)) > size:
            raise bad(place, f"must have at most {size} bytes as JSON")

    return check


def kept(holder: Mapping[str, Any], checks: Mapping[str, Check], place: str) -> dict[str, Any]:
    """Returns the fields of `holder` that `checks` names, checked; null stays null."""
    fields = {}
    for name, value in holder.items():
        check = checks.get(name)
        if check is not None:
            if value is not None:
                check(value, f"{place}.{name}")
            fields[name] = value
    return fields


def refuse_others(holder: Mapping[str, Any], known: Collection[str], place: str) -> None:
    for name in holder:
        if name not in known:
            raise bad(f"{place}.{name[:80]}", "is not supported")


def template_variables(value: Any, place: str) -> None:
    """Checks variables for the chat template: none has the name of an argument of the engine."""
    _VARIABLES(value, place)
    for name in value:
        if name in RESERVED:
            raise bad(f"{place}.{name}", "is not a variable that an agent may set: leave it out")


def either(*checks: Check) -> Check:
    """Returns the check for a value that passes one of `checks`; the last one's error counts."""

    def check(value: Any, place: str) -> None:
        for check in checks[:-1]:
            try:
                return check(value, place)
            except InputError:
                continue
        return checks[-1](value, place)

    return check


def instance(*types: type, what: str) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, types):
            raise bad(place, f"must be {what}")

    return check


def one_of(*values: Any) -> Check:
    def check(value: Any, place: str) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            raise bad(place, f"must be {' or '.join(map(str, values))}")

    return check


an_object = instance(dict, what="an object")
NAME = text(KIBIBYTE)
LONG_TEXT = text(64 * KIBIBYTE * KIBIBYTE)
"""As long as a request may be."""
EFFORT = text(64)
SEED = whole(-_INT64, _INT64 - 1)
TOKENS = whole(1, LARGEST_INT32)
TOKEN_ID = whole(0, LARGEST_INT32)
MAX_CHOICES = 128
"""Answers to one request."""
CHOICES = whole(1, MAX_CHOICES)
TOP_LOGPROBS = whole(0, 20)
STOP_TEXTS = items(64, text(KIBIBYTE))
STOP = either(text(KIBIBYTE), STOP_TEXTS)
_VARIABLES = bounded_object(16 * KIBIBYTE)


class FieldTable(NamedTuple):
    """The fields of one API.

    Args:
        engine: sent to the engine under their own names.
        read: read here: they are translated, or shape the answer that the agent gets.
        dropped: of no effect. Clients send them by themselves; samplers are the run's.
        refused: with the reason; allowed where they are off (`is_off`).
    """

    engine: Mapping[str, Check]
    read: Mapping[str, Check]
    dropped: frozenset[str]
    refused: Mapping[str, str]


_MESSAGES = items(100_000)
_TOOLS = items(KIBIBYTE)
_OPTIONS = bounded_object(64 * KIBIBYTE)
_SCHEMA = bounded_object(256 * KIBIBYTE)

_SAMPLERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "typical_p",
    "tfs",
    "top_a",
    "mirostat",
    "length_penalty",
    "dry_multiplier",
    "watermarking",
)
_ACCOUNTS = (
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_INEXACT = {
    "truncate_prompt_tokens": "it would cut the prompt silently",
    "use_beam_search": "beams are not samples",
    "best_of": "discarded answers would be lost",
}
_ANY_DIALECT: dict[str, Check] = {"seed": SEED, "chat_template_kwargs": template_variables}
_SAMPLED: dict[str, Check] = {
    "n": CHOICES,
    "seed": SEED,
    "stop": STOP,
    "stop_token_ids": items(64, TOKEN_ID),
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "add_special_tokens": flag,
    "return_tokens_as_token_ids": flag,
    "response_format": _SCHEMA,
}
_STREAMED: dict[str, Check] = {"model": NAME, "stream": flag, "stream_options": _OPTIONS}

CHAT = FieldTable(
    engine={
        **_SAMPLED,
        **_ANY_DIALECT,
        "top_logprobs": TOP_LOGPROBS,
        "tool_choice": either(one_of("auto", "none", "required"), _OPTIONS),
        "parallel_tool_calls": flag,
        "reasoning_effort": EFFORT,
        "include_reasoning": flag,
        "continue_final_message": flag,
        "add_generation_prompt": flag,
    },
    read={
        **_STREAMED,
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "max_tokens": TOKENS,
        "max_completion_tokens": TOKENS,
        "logprobs": flag,
        "return_token_ids": flag,
        "modalities": items(1, one_of("text")),
    },
    dropped=frozenset((*_SAMPLERS, *_ACCOUNTS, "prediction", "verbosity", "web_search_options")),
    refused={
        **_INEXACT,
        "functions": "send tools",
        "function_call": "send tool_choice",
        "audio": "answers are text",
    },
)

COMPLETIONS = FieldTable(
    engine={**_SAMPLED, "logprobs": either(one_of(False), TOP_LOGPROBS)},
    read={
        **_STREAMED,
        "prompt": either(LONG_TEXT, items(64 * KIBIBYTE * KIBIBYTE)),
        "max_tokens": TOKENS,
        "return_token_ids": flag,
    },
    dropped=frozenset((*_SAMPLERS, *_ACCOUNTS)),
    refused={**_INEXACT, "echo": "answers hold no prompt", "suffix": "there is no text behind it"},
)

RESPONSES = FieldTable(
    engine=_ANY_DIALECT,
    read={
        **_STREAMED,
        "input": either(LONG_TEXT, _MESSAGES),
        "instructions": LONG_TEXT,
        "previous_response_id": NAME,
        "tools": _TOOLS,
        "tool_choice": either(NAME, _OPTIONS),
        "parallel_tool_calls": flag,
        "max_tool_calls": whole(1, 2**31 - 1),
        "max_output_tokens": TOKENS,
        "text": _SCHEMA,
        "reasoning": _OPTIONS,
        "include": items(64, NAME),
        "top_logprobs": TOP_LOGPROBS,
        "truncation": NAME,
        "n": CHOICES,
        # Repeated in the answer.
        "metadata": _OPTIONS,
        "store": flag,
        "user": NAME,
        "safety_identifier": NAME,
        "prompt_cache_key": NAME,
        "temperature": number(0, 100),
        "top_p": number(0, 1),
    },
    dropped=frozenset(
        (*_SAMPLERS, *_ACCOUNTS, "access_programs", "client_metadata", "return_token_ids")
    ),
    refused={
        **_INEXACT,
        "background": "responses are only returned directly",
        "image": "answers are text",
        "conversation": "conversations are not stored here; use previous_response_id",
        "prompt": "prompts are not stored here",
        "context_management": "it would cut the prompt silently",
    },
)

MESSAGES = FieldTable(
    engine=_ANY_DIALECT,
    read={
        **_STREAMED,
        "messages": _MESSAGES,
        "system": either(LONG_TEXT, _MESSAGES),
        "max_tokens": TOKENS,
        "tools": _TOOLS,
        "tool_choice": _OPTIONS,
        "stop_sequences": STOP_TEXTS,
        "thinking": _OPTIONS,
        "thread": either(NAME, _OPTIONS),
        "output_config": _SCHEMA,
        "output_format": _SCHEMA,
        "n": CHOICES,
    },
    dropped=frozenset(
        (
            *_SAMPLERS,
            *_ACCOUNTS,
            "billing_policy",
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "return_token_ids",
            "speed",
            "user_profile_id",
            "workspace_id",
        )
    ),
    refused={
        **_INEXACT,
        "container": "there are no containers",
        "mcp_servers": "there are no tools but the agent's own",
        "compaction": "there are no summaries but the agent's own",
    },
)

_STEERING = frozenset(
    (
        *("cache_salt", "chat_template", "documents", "ec_transfer_params", "kv_transfer_params"),
        *("logits_processors", "logprob_token_ids", "lora_request", "media_io_kwargs"),
        *("mm_payload", "mm_processor_kwargs", "previous_input_messages", "priority"),
        *("prompt_embeds", "prompt_logprobs", "repetition_detection", "request_id"),
        *("routed_experts_prompt_start", "truncation_side", "vllm_xargs"),
        *("custom_logit_processor", "ebnf", "input_ids", "lora_path", "regex", "rid"),
    )
)
"""Fields by which a request steers vLLM or SGLang."""
_MEANINGLESS = ("thinking", "reasoning")
"""Fields of one API that programs also send to the others."""
_OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (False, 1),
    "function_call": ("none",),
    "thinking_token_budget": (-1,),
}
"""Values by which a field switches nothing on; of others false, 0 and what is empty."""


def is_ignored(name: str) -> bool:
    """Whether a field of no table is ignored: it steers no engine and is in no other API."""
    tables = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
    known = (name in (*table.engine, *table.read, *table.refused) for table in tables)
    return name in _MEANINGLESS or not (name in _STEERING or any(known))


def is_off(name: str, value: Any) -> bool:
    return value in _OFF[name] if name in _OFF else not value


Memory = dict[str, Any]
"""State of a dialect for one attempt, such as stored responses (`previous_response_id`)."""


class EventWriter(Protocol):
    """Writes one answer as server-sent events: chunk*, then end (after recording) or fail."""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The chunk that ends a choice, and the one with the usage, come only after recording."""

    def end(self) -> bytes: ...

    def fail(self, error: EnvserverError) -> bytes: ...


class DialectAdapter(Protocol):
    """Translates between one API and the common form (ModelRequest, chat answers)."""

    name: Dialect
    table: FieldTable
    """The fields of a request; `read` gets no others, and none that is null."""

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest: ...

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        """Returns the chat answer in this dialect. Called after the calls are recorded."""

    def writer(self, request: ModelRequest, memory: Memory) -> EventWriter: ...

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_body(error)


_PASSED = ("seed", "chat_template_kwargs")
"""An engine's own fields that agents may add in every dialect."""
_FUNCTION: dict[str, Check] = {
    "name": NAME,
    "description": LONG_TEXT,
    "parameters": an_object,
    "strict": flag,
}
_SCHEMA_FIELDS: dict[str, Check] = {
    "name": NAME,
    "description": LONG_TEXT,
    "schema": an_object,
    "strict": flag,
}
_TAG = ("type", "format", "structures", "triggers")
"""Fields of vLLM's `structural_tag`, which only `tokens.constraints` all allows."""


def engine_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in _PASSED if body.get(name) is not None}


def effort_fields(effort: Any, place: str) -> dict[str, Any]:
    if effort is None:
        return {}
    EFFORT(effort, place)
    return {"reasoning_effort": effort}


TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts in OpenAI's APIs, with the field that holds the text."""


def object_part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise bad(place, "must be an object")
    return part


def named_choice(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the tool_choice of the chat API that names one of `tools`."""
    if all(tool["function"]["name"] != name for tool in tools):
        raise bad("tool_choice.name", f"{name[:80]!r} is not among the tools")
    return {"type": "function", "function": {"name": name}}


def own_tools(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the tools in field `tools` with their places.

    A provider's own web search is left out: clients offer it by default, and nothing could run it.
    """
    for index, tool in enumerate(objects(body, "tools")):
        if not str(tool.get("type")).startswith("web_search"):
            yield tool, f"tools[{index}]"


def function_tool(function: dict[str, Any], place: str) -> dict[str, Any]:
    string(function, "name", place)
    return {"type": "function", "function": kept(function, _FUNCTION, place)}


def schema_format(schema: dict[str, Any], place: str) -> dict[str, Any]:
    refuse_others(schema, _SCHEMA_FIELDS, place)
    return {"type": "json_schema", "json_schema": kept(schema, _SCHEMA_FIELDS, place)}


def response_format(form: dict[str, Any], place: str) -> dict[str, Any]:
    match form.get("type"):
        case "text" | "json_object" as kind:
            refuse_others(form, ("type",), place)
            return {"type": kind}
        case "json_schema":
            refuse_others(form, ("type", "json_schema"), place)
            return schema_format(mapping(form, "json_schema", place), f"{place}.json_schema")
        case "structural_tag":
            refuse_others(form, _TAG, place)
            return form
        case kind:
            raise impossible(kind, f"{place}.type")
