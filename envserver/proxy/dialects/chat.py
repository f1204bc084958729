"""OpenAI's chat completions, which is also the common form, and its text completions, for agents
that render or even tokenise their own prompts.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect, Message

from ..asgi import DONE, error_body, event
from .base import (
    CHAT,
    COMPLETIONS,
    KIBIBYTE,
    LARGEST_INT32,
    LONG_TEXT,
    MAX_CHOICES,
    NAME,
    TEXTS,
    Check,
    DialectAdapter,
    Memory,
    ModelRequest,
    an_object,
    bad,
    function_tool,
    instance,
    items,
    kept,
    mapping,
    object_part,
    objects,
    one_of,
    own_tools,
    response_format,
    string,
    text,
    unsupported,
)
from .conversation import media_part

_ID = text(64 * KIBIBYTE)
"""Id of a tool call. Some clients keep signatures in it, so it may be long."""
_MOST_ROLE = 64
_PLAIN = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_MESSAGE: dict[str, Check] = {
    "role": text(_MOST_ROLE),
    "content": instance(str, list, what="a text or a list of parts"),
    "name": NAME,
    "tool_calls": items(10_000, an_object),
    "tool_call_id": _ID,
    "function_call": an_object,
    "refusal": LONG_TEXT,
    "reasoning": LONG_TEXT,
    "reasoning_content": LONG_TEXT,
}
"""Clients send more back (annotations, parsed values, costs), which no engine reads."""
_CALL: dict[str, Check] = {"id": _ID, "type": one_of("function"), "function": an_object}
_CALLED: dict[str, Check] = {
    "name": NAME,
    "arguments": instance(str, dict, what="a text or an object"),
}


def chat_messages(body: dict[str, Any], checked: int = 0) -> list[Message]:
    """Returns the messages in field `messages`; the first `checked` were returned before."""
    given = objects(body, "messages", needed=True)
    return given[:checked] + [
        message if _is_plain(message) else _message(message, f"messages[{index}]")
        for index, message in enumerate(given[checked:], checked)
    ]


def chat_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [_tool(tool, place) for tool, place in own_tools(body)]


def chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the value of field `tool_choice`, and the tools that it leaves."""
    if isinstance(choice, str):
        return choice, tools
    match choice.get("type"):
        case "function":
            name = _function_name(choice, "tool_choice")
            return {"type": "function", "function": {"name": name}}, tools
        case "allowed_tools":
            place = "tool_choice.allowed_tools"
            allowed = mapping(choice, "allowed_tools", "tool_choice")
            if allowed.get("mode") not in ("auto", "required"):
                raise bad(f"{place}.mode", "must be auto or required")
            given = enumerate(objects(allowed, "tools", needed=True))
            names = {_function_name(tool, f"{place}.tools[{index}]") for index, tool in given}
            return allowed["mode"], [tool for tool in tools if tool["function"]["name"] in names]
        case kind:
            raise unsupported(kind, "tool_choice")


def _function_name(holder: dict[str, Any], place: str) -> str:
    return string(mapping(holder, "function", place), "name", f"{place}.function")


def _is_plain(message: Message) -> bool:
    """Returns whether nothing in `message` needs a closer look, as in most of a conversation."""
    if not message.keys() <= _PLAIN:
        return False
    for name, value in message.items():
        if name == "tool_calls":
            if type(value) is not list or not all(map(_is_plain_call, value)):
                return False
        elif type(value) is not str and (value is not None or name == "role"):
            return False
    ids = message.get("tool_call_id") or ""
    return 0 < len(message.get("role", "")) <= _MOST_ROLE and len(ids) <= KIBIBYTE


def _is_plain_call(call: Any) -> bool:
    if type(call) is not dict or call.keys() != _CALL.keys() or call["type"] != "function":
        return False
    function, call_id = call["function"], call["id"]
    if type(function) is not dict or function.keys() != _CALLED.keys() or type(call_id) is not str:
        return False
    name, arguments = function["name"], function["arguments"]
    is_text = type(name) is str and type(arguments) is str
    return is_text and len(call_id) <= KIBIBYTE and len(name) <= KIBIBYTE


def _message(message: Message, place: str) -> Message:
    string(message, "role", place)
    known = kept(message, _MESSAGE, place)
    if isinstance(known.get("content"), list):
        parts = enumerate(known["content"])
        known["content"] = [_part(part, f"{place}.content[{index}]") for index, part in parts]
    if known.get("tool_calls"):
        calls = enumerate(known["tool_calls"])
        known["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in calls]
    if known.get("function_call"):
        known["function_call"] = kept(known["function_call"], _CALLED, f"{place}.function_call")
    return known


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the known fields of a tool call; its arguments may be text that is not JSON."""
    known = kept(call, _CALL, place)
    if known.get("function") is not None:
        known["function"] = kept(known["function"], _CALLED, f"{place}.function")
    return known


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = object_part(part, place).get("type")
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": kind, TEXTS[kind]: string(part, TEXTS[kind], place)}
    media = media_part(part, place)
    if media is None:
        raise unsupported(kind, place)
    return media


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "function"):
        raise unsupported(kind, place, ": all tools must be the agent's own functions")
    return function_tool(mapping(tool, "function", place), f"{place}.function")


CHECKED = "checked"
"""How many of the messages were in an earlier request of the attempt, and need no check."""


class ChatDialect(DialectAdapter):
    name: Dialect = "chat"
    table = CHAT

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        messages = chat_messages(body, memory.pop(CHECKED, 0))
        fields, tools = _fields_and_tools(body)
        options = body.get("stream_options")
        wanted = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        return ModelRequest(
            dialect="chat",
            body=body,
            messages=messages,
            tools=tools,
            fields=fields,
            choices=body.get("n", 1),
            wanted_tokens=min((n for n in wanted if n is not None), default=None),
            tokens_field="max_tokens" if wanted[0] is None else "max_completion_tokens",
            stream=bool(body.get("stream")),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            wants_logprobs=bool(body.get("logprobs")),
            wants_token_ids=bool(body.get("return_token_ids")),
            wants_reasoning=body.get("include_reasoning") is not False,
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        return answer

    def writer(self, request: ModelRequest, memory: Memory) -> ChatWriter:
        return ChatWriter()


def _fields_and_tools(body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    fields = {name: value for name, value in body.items() if name in CHAT.engine}
    tools = chat_tools(body)
    if "tool_choice" in fields:
        fields["tool_choice"], tools = chat_tool_choice(fields["tool_choice"], tools)
    if not tools:
        fields.pop("parallel_tool_calls", None)
        if fields.pop("tool_choice", "auto") not in ("auto", "none"):
            raise bad("tool_choice", "needs tools")
    if "response_format" in fields:
        fields["response_format"] = response_format(fields["response_format"], "response_format")
    return fields, tools


class ChatWriter:
    def chunk(self, chunk: dict[str, Any]) -> bytes:
        return event(chunk)

    def end(self) -> bytes:
        return DONE

    def fail(self, error: EnvserverError) -> bytes:
        return event(error_body(error))


_DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API and of engines."""


class CompletionsDialect(DialectAdapter):
    name: Dialect = "completions"
    table = COMPLETIONS

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        prompts = _prompts(body.get("prompt"))
        options = body.get("stream_options")
        fields = {name: value for name, value in body.items() if name in COMPLETIONS.engine}
        if fields.get("logprobs") is False:
            del fields["logprobs"]
        if "response_format" in fields:
            form = fields["response_format"]
            fields["response_format"] = response_format(form, "response_format")
        choices = body.get("n", 1) * len(prompts)
        if choices > MAX_CHOICES:
            raise bad(
                "n", f"asks for {choices} answers, all prompts together: {MAX_CHOICES} at most"
            )
        return ModelRequest(
            dialect="completions",
            body=body,
            messages=[
                {"role": "user", "content": text} for text in prompts if isinstance(text, str)
            ],
            prompt=prompts[0] if len(prompts) == 1 else prompts,
            fields=fields,
            choices=choices,
            wanted_tokens=body.get("max_tokens", _DEFAULT_MAX_TOKENS),
            stream=bool(body.get("stream")),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            wants_logprobs="logprobs" in fields,
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        completion = {**answer, "object": "text_completion"}
        completion["choices"] = [_choice(c, c["message"]) for c in answer["choices"]]
        return completion

    def writer(self, request: ModelRequest, memory: Memory) -> CompletionsWriter:
        return CompletionsWriter()


class CompletionsWriter(ChatWriter):
    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """Skips the chunk with the role, which exists only in chats."""
        parts = [part for part in chunk["choices"] if not _is_role(part)]
        if chunk["choices"] and not parts:
            return b""
        completion = {**chunk, "object": "text_completion"}
        completion["choices"] = [_choice(part, part["delta"]) for part in parts]
        return event(completion)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) <= MAX_CHOICES and all(isinstance(p, str) or _is_ids(p) for p in prompt):
            return prompt
    raise bad("prompt", f"must be a text, a list of token ids, or up to {MAX_CHOICES} of these")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token <= LARGEST_INT32 for token in value)
    )


def _is_role(part: dict[str, Any]) -> bool:
    delta = part["delta"]
    return "role" in delta and not delta.get("content") and part.get("finish_reason") is None


def _choice(choice: dict[str, Any], message: Message) -> dict[str, Any]:
    fields = {
        "index": choice.get("index", 0),
        "text": message.get("content") or "",
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }
    kept = ("stop_reason", "token_ids", "prompt_token_ids")
    return fields | {name: choice[name] for name in kept if name in choice}
