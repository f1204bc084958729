"""Anthropic's messages API.

Reasoning is shown to agents that ask for it, without a signature.
"""

from __future__ import annotations

from typing import Any

import orjson
from envserver_records.errors import EnvserverError, InputError, LimitReached
from envserver_records.records import Dialect, Message

from ..asgi import is_context_limit
from .base import (
    MESSAGES,
    DialectAdapter,
    Memory,
    ModelRequest,
    bad,
    boolean,
    effort_fields,
    engine_fields,
    function_tool,
    impossible,
    mapping,
    named_choice,
    object_part,
    objects,
    own_tools,
    string,
    unsupported,
)
from .conversation import (
    AnswerEnd,
    Conversation,
    Part,
    TextPart,
    ToolCall,
    answer_message,
    choice_of,
    data_url,
    ending_of,
    image_part,
    named_event,
    new_id,
    parts_of,
    text_part,
)

_NOT_AN_OBJECT = "arguments"


class Arguments:
    """The arguments of all tool calls of one attempt, kept in `memory`.

    An agent gets an object and sends it back, but the history must hold the text that the model
    wrote, with its exact spaces and numbers.
    """

    def __init__(self, memory: Memory) -> None:
        self._texts: dict[str, str] = memory.setdefault("arguments", {})

    def keep(self, call_id: str, arguments: str) -> None:
        self._texts[call_id] = arguments

    def given(self, call_id: str, value: dict[str, Any]) -> str:
        """Returns the model's text for `value`, which an agent sent back, or else its JSON."""
        kept = self._texts.get(call_id)
        if kept is not None and _same(as_object(kept), value):
            return kept
        return orjson.dumps(value).decode()


def as_object(arguments: str) -> dict[str, Any]:
    """Returns arguments as an object; anything else is wrapped in one, so nothing is hidden."""
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {_NOT_AN_OBJECT: arguments}


def as_json(arguments: str) -> str:
    """Returns `as_object` as text: the model's own if that is an object."""
    if arguments.strip() and is_object(arguments):
        return arguments
    return orjson.dumps(as_object(arguments)).decode()


def is_object(arguments: str) -> bool:
    """Returns whether arguments are an object as JSON, or empty, which counts as {}."""
    return as_object(arguments) != {_NOT_AN_OBJECT: arguments}


def _same(value: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


Block = dict[str, Any]

_STOPS = {"length": "max_tokens", "content_filter": "refusal"}
"""Stop reasons of answers that ended early, by the engine's finish reason."""


def head_of(request: ModelRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an empty message that answers `request`; `answer`: whole, or its first chunk."""
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model") or str(request.body.get("model") or ""),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage_of(AnswerEnd()),
    }


def text_block(text: str) -> Block:
    return {"type": "text", "text": text, "citations": None}


def thinking_block(text: str) -> Block:
    return {"type": "thinking", "thinking": text, "signature": ""}


def call_block(call: ToolCall) -> Block:
    value = as_object(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def stop_of(ending: AnswerEnd, *, called: bool) -> dict[str, Any]:
    """Any other interruption is `max_tokens`: the agent knows that the answer may be incomplete."""
    reason, sequence = _STOPS.get(ending.finish_reason or "", "max_tokens"), None
    if ending.is_whole:
        reason = "tool_use" if called else "end_turn"
        if not called and ending.stop_string is not None:
            reason, sequence = "stop_sequence", ending.stop_string
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(ending: AnswerEnd) -> dict[str, Any]:
    """Returns the engine's token counts; cached tokens count as input."""
    return {
        "input_tokens": ending.tokens("prompt_tokens"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": ending.tokens("completion_tokens"),
    }


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(error: EnvserverError) -> dict[str, Any]:
    """Returns the body or event for `error`; `detail["error_code"]`, if any, is for the client."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if isinstance(error, LimitReached):  # sent with status 400: waiting does not help
        kind = "invalid_request_error"
    said: dict[str, Any] = {"type": kind, "message": _message(error)}
    if "error_code" in error.detail:
        said["details"] = {"error_code": error.detail["error_code"]}
    return {"type": "error", "error": said}


def _message(error: EnvserverError) -> str:
    """Returns the message; that of a full context in the words by which clients recognise it."""
    if not is_context_limit(error):
        return str(error)
    prompt, answer, most = (
        error.detail.get(name) for name in ("prompt_tokens", "answer_tokens", "context_tokens")
    )
    if prompt is None or most is None:
        return f"prompt is too long: {error.message}"
    if prompt > most or answer is None:
        return f"prompt is too long: {prompt} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )


class MessagesWriter:
    """Has at most one content block open at a time."""

    def __init__(self, request: ModelRequest, arguments: Arguments) -> None:
        self._request = request
        self._arguments = arguments
        self._begun = False
        self._blocks = 0
        self._open = ""
        self._called = False
        self._ending = AnswerEnd()

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        events = self._beginning(chunk)
        self._ending.take(chunk)
        for part in parts_of(choice_of(chunk).get("delta") or {}):
            events += self._call(part) if isinstance(part, ToolCall) else self._text(part)
        return events

    def end(self) -> bytes:
        events = self._beginning({}) + self._close()
        usage = usage_of(self._ending)
        stop = stop_of(self._ending, called=self._called)
        events += named_event({"type": "message_delta", "delta": stop, "usage": usage})
        return events + named_event({"type": "message_stop"})

    def fail(self, error: EnvserverError) -> bytes:
        return named_event(error_of(error))

    def _beginning(self, chunk: dict[str, Any]) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = head_of(self._request, chunk)
        return named_event({"type": "message_start", "message": message}) + _PING

    def _text(self, text_part: TextPart) -> bytes:
        thinks = text_part.kind == "reasoning"
        block = thinking_block("") if thinks else text_block("")
        events = b""
        if self._open != block["type"]:
            events = self._close() + self._start(block)
        if thinks:
            return events + self._delta("thinking_delta", thinking=text_part.text)
        return events + self._delta("text_delta", text=text_part.text)

    def _call(self, call: ToolCall) -> bytes:
        self._called = True
        self._arguments.keep(call.id, call.arguments)
        events = self._close() + self._start(call_block(call) | {"input": {}})
        return events + self._delta("input_json_delta", partial_json=as_json(call.arguments))

    def _start(self, block: Block) -> bytes:
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return named_event(start)

    def _delta(self, kind: str, **more: str) -> bytes:
        delta = {"type": kind, **more}
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta("signature_delta", signature="")
        events += named_event({"type": "content_block_stop", "index": self._blocks})
        self._open = ""
        self._blocks += 1
        return events


_PING = named_event({"type": "ping"})


_BILLING = "x-anthropic-billing-header"
"""Prefix of a system block that clients send for billing, not for the model."""


def messages_of(body: dict[str, Any], arguments: Arguments) -> list[Message]:
    """Returns the messages in fields `system` and `messages`, without an empty turn at the end.

    Tool results in a user's turn become messages before the rest of the turn. What chats have no
    place for (signatures, encrypted reasoning, cache marks) is left out.
    """
    conversation = Conversation()
    if body.get("system") is not None:
        _system(conversation, body, "system", "")
    for index, turn in enumerate(objects(body, "messages", needed=True)):
        place = f"messages[{index}]"
        match turn.get("role"):
            case "user":
                _user(conversation, turn, place)
            case "assistant":
                _assistant(conversation, turn, place, arguments)
            case "system":
                _system(conversation, turn, "content", place)
            case role:
                raise impossible(role, f"{place}.role")
    messages = conversation.messages()
    if len(messages) > 1 and messages[-1] == answer_message("", "", ()):
        messages.pop()
    if not messages:
        raise bad("messages", "must not be empty")
    return messages


def _system(conversation: Conversation, holder: dict[str, Any], name: str, place: str) -> None:
    texts = [string(b, "text", at) for b, at in _blocks(holder, name, place, ("text",))]
    text = "".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        conversation.system([text_part(text)])


def _user(conversation: Conversation, turn: dict[str, Any], place: str) -> None:
    parts = []
    blocks = _blocks(turn, "content", place)
    for block, at in blocks:
        if block.get("type") == "tool_result":
            conversation.tool(string(block, "tool_use_id", at), _result(block, at))
        else:
            parts.append(_part(block, at))
    if parts:
        conversation.user(parts)
    elif not blocks:
        raise bad(f"{place}.content", "must not be empty")


def _result(block: dict[str, Any], place: str) -> list[Part]:
    """Returns a tool's result; a failure gets the prefix "Error: " unless it begins so itself."""
    given = _blocks(block, "content", place) if block.get("content") is not None else []
    parts = [_part(part, at) for part, at in given]
    if not boolean(block, "is_error", place):
        return parts
    first = parts[0].get("text", "") if parts else ""
    said = str(first).lstrip().lower().startswith("error")
    return parts if said else _behind("Error: ", parts)


def _behind(prefix: str, parts: list[Part]) -> list[Part]:
    if parts and parts[0]["type"] == "text":
        return [text_part(prefix + parts[0]["text"]), *parts[1:]]
    return [text_part(prefix.rstrip()), *parts]


def _assistant(
    conversation: Conversation, turn: dict[str, Any], place: str, arguments: Arguments
) -> None:
    reasoning, texts, calls = "", "", []
    for block, at in _blocks(turn, "content", place):
        match block.get("type"):
            case "thinking":
                reasoning += string(block, "thinking", at)
            case "redacted_thinking":
                continue
            case "text":
                texts += string(block, "text", at)
            case "tool_use":
                calls.append(_call(block, at, arguments))
            case kind:
                raise unsupported(kind, at)
    conversation.assistant(reasoning=reasoning, text=texts, calls=calls)


def _call(block: dict[str, Any], place: str, arguments: Arguments) -> ToolCall:
    call_id = string(block, "id", place)
    given = arguments.given(call_id, mapping(block, "input", place))
    return ToolCall(call_id, string(block, "name", place), given)


def _blocks(
    holder: dict[str, Any], name: str, place: str, kinds: tuple[str, ...] = ()
) -> list[tuple[dict[str, Any], str]]:
    """Returns the blocks in field `name` with their places; a string becomes one block."""
    path = f"{place}.{name}" if place else name
    given = holder.get(name)
    if isinstance(given, str):
        return [({"type": "text", "text": given}, path)]
    if not isinstance(given, list):
        raise bad(path, "must be a text or a list of blocks")
    blocks = [(block, f"{path}[{index}]") for index, block in enumerate(given)]
    for block, at in blocks:
        kind = object_part(block, at).get("type")
        if kinds and kind not in kinds:
            raise unsupported(kind, at)
    return blocks


def _part(block: dict[str, Any], place: str) -> Part:
    match block.get("type"):
        case "text":
            return text_part(string(block, "text", place))
        case "image":
            return image_part(_image_url(mapping(block, "source", place), f"{place}.source"))
        case "document":
            return text_part(_document(block, place))
        case kind:
            raise unsupported(kind, place)


def _image_url(source: dict[str, Any], place: str) -> str:
    match source.get("type"):
        case "url":
            return data_url(source.get("url"), "image", f"{place}.url")
        case "base64":
            kind, data = (string(source, name, place) for name in ("media_type", "data"))
            return data_url(f"data:{kind};base64,{data}", "image", place)
        case kind:
            raise unsupported(kind, place)


def _document(block: dict[str, Any], place: str) -> str:
    source, at = mapping(block, "source", place), f"{place}.source"
    match source.get("type"):
        case "text":
            text = string(source, "data", at)
        case "content":
            given = _blocks(source, "content", at, ("text",))
            text = "\n".join(string(part, "text", where) for part, where in given)
        case kind:
            raise unsupported(kind, at, ": only text is")
    heads = [string(block, n, place) for n in ("title", "context") if block.get(n) is not None]
    return "\n".join([*heads, text])


# `budget_tokens` for thinking is not enforced: tokens that an engine forces are not sampled.

_NO_THREADS = "thread_unsupported_request"
"""The error code on which Anthropic's client sends the whole conversation instead of a thread."""
_TOOL_FIELDS = ("name", "description", "strict")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools")


def wants_thinking(body: dict[str, Any]) -> bool:
    thinking = mapping(body, "thinking")
    kind = thinking.get("type", "disabled")
    if kind not in (*_THINKING, "disabled"):
        raise impossible(kind, "thinking.type")
    return kind in _THINKING and thinking.get("display") != "omitted"


def fields_of(
    body: dict[str, Any], tools: list[dict[str, Any]], messages: list[Message]
) -> dict[str, Any]:
    fields = engine_fields(body)
    if body.get("stop_sequences"):
        fields["stop"] = body["stop_sequences"]
    fields |= _tool_fields(body, tools) | _prefill_fields(messages)
    output = mapping(body, "output_config")
    form = mapping(output, "format", "output_config") or mapping(body, "output_format")
    if form:
        fields["response_format"] = _response_format(form)
    kind = mapping(body, "thinking").get("type")
    if kind is not None:
        own = fields.get("chat_template_kwargs") or {}
        fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"} | own
    return fields | effort_fields(output.get("effort"), "output_config.effort")


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        why = ": all tools must be the agent's own, each with its input_schema"
        raise unsupported(tool["type"], place, why)
    schema = mapping(tool, "input_schema", place)
    given = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
    given["parameters"] = schema if "type" in schema else {"type": "object"} | schema
    return function_tool(given, place)


def _tool_fields(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    choice = mapping(body, "tool_choice")
    if not choice:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if kind == "tool":
        fields["tool_choice"] = named_choice(string(choice, "name", "tool_choice"), tools)
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise impossible(kind, "tool_choice.type")
    if boolean(choice, "disable_parallel_tool_use", "tool_choice"):
        fields["parallel_tool_calls"] = False
    if not tools and kind == "any":
        raise bad("tool_choice", "needs tools")
    return fields if tools else {}


def _prefill_fields(messages: list[Message]) -> dict[str, Any]:
    """Returns the fields that let the model continue the assistant's message at the end, if any."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if last.get("tool_calls"):
        raise bad("messages", "end with tool calls that have no results")
    text = last["content"]
    if not text or text != text.rstrip():
        raise bad(
            "messages",
            "end with an assistant message to continue: it must have text and not end with"
            " whitespace",
        )
    return {"continue_final_message": True, "add_generation_prompt": False}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad("output_config.format", "must be a json_schema with its schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": form["schema"], "strict": True},
    }


class MessagesDialect(DialectAdapter):
    name: Dialect = "messages"
    table = MESSAGES

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        if body.get("thread"):
            raise InputError(
                "thread is not supported: send the whole conversation.",
                place="thread",
                error_code=_NO_THREADS,
            )
        if body.get("n") not in (None, 1):
            raise bad("n", "must be 1: a message is one answer")
        if "max_tokens" not in body:
            raise bad("max_tokens", "is missing")
        tools = [_tool(tool, place) for tool, place in own_tools(body)]
        messages = messages_of(body, Arguments(memory))
        return ModelRequest(
            dialect="messages",
            body=body,
            messages=messages,
            tools=tools,
            fields=fields_of(body, tools, messages),
            wanted_tokens=body["max_tokens"],
            stream=body.get("stream", False),
            wants_reasoning=wants_thinking(body),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        content, called, arguments = [], False, Arguments(memory)
        for part in parts_of(choice_of(answer)["message"]):
            if isinstance(part, ToolCall):
                called = True
                arguments.keep(part.id, part.arguments)
                content.append(call_block(part))
            elif part.kind == "reasoning":
                content.append(thinking_block(part.text))
            else:
                content.append(text_block(part.text))
        ending = ending_of(answer)
        message = head_of(request, answer) | {"content": content} | stop_of(ending, called=called)
        return message | {"usage": usage_of(ending)}

    def writer(self, request: ModelRequest, memory: Memory) -> MessagesWriter:
        return MessagesWriter(request, Arguments(memory))

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_of(error)
