"""Checks request bodies; reads the conversation from messages or from a prompt's text.

Both give the same conversation, so the policy gives the same answer whether an agent sends messages
or a proxy sends the ids of the rendered prompt.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from .tokenizer import IM_END, IM_START, canonical_arguments, parsed


class Conversation(msgspec.Struct, frozen=True):
    """Messages with text contents, and the offered tools in OpenAI's format."""

    messages: list[Message]
    tools: list[dict[str, Any]]

    def turn(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


def refusal(message: str, *, param: str | None = None, status: int = 400) -> EngineRefused:
    return EngineRefused(message, status=status, param=param)


def plain_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Returns the messages with contents as text and arguments of calls as canonical JSON."""
    if not messages:
        raise refusal("There must be at least one message.", param="messages")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if tools is not None and not tools:
        raise refusal("`tools` must not be empty; leave it out instead.", param="tools")
    for index, tool in enumerate(tools or []):
        if not _is_tool(tool):
            raise refusal(
                "A tool needs type 'function', a name, and parameters that are an object.",
                param=f"tools[{index}]",
            )
    return tools or []


def conversation_of_text(text: str) -> Conversation:
    """Parses the conversation in a rendered prompt; text without ChatML is a user's message."""
    blocks = text.split(IM_START)[1:]
    messages: list[Message] = []
    for block in blocks:
        role, _, content = block.partition("\n")
        content, closed, _ = content.rpartition(IM_END)
        if closed:
            messages.append(_read_back(role, content))
    if not messages:
        return Conversation([{"role": "user", "content": text}], [])
    return Conversation(messages, _offered(messages))


def _plain(message: dict[str, Any], place: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise refusal("A message needs a role.", param=f"{place}.role")
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{place}.content")}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise refusal("`tool_calls` must be a list.", param=f"{place}.tool_calls")
        plain["tool_calls"] = [
            _plain_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return plain


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [_text_of(part) for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and None not in texts:
            return "".join(text for text in texts if text is not None)
    raise refusal("The simulated engine reads text and images only.", param=place)


def _text_of(part: dict[str, Any]) -> str | None:
    """Returns a part as text: an image as a word that other images do not have."""
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict):
        return f"<image {hashlib.sha256(str(image.get('url')).encode()).hexdigest()[:12]}>"
    text = part.get("text")
    return text if isinstance(text, str) else None


def _plain_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refusal("A tool call needs a function with a name.", param=place)
    arguments = function.get("arguments") or "{}"
    try:
        arguments = canonical_arguments(arguments)
    except ValueError:
        # Another model may have written them: text that cannot be parsed stays as it is.
        if not isinstance(arguments, str):
            raise refusal("The arguments of a call must be JSON.", param=place) from None
    return {"function": {"name": function["name"], "arguments": arguments}}


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return False
    function = tool.get("function")
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
    )


def _read_back(role: str, content: str) -> Message:
    if role == "tool":
        content = content.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    if role != "assistant":
        return {"role": role, "content": content}
    said, calls = parsed(content)
    message: Message = {"role": role, "content": said or ""}
    if calls:
        message["tool_calls"] = [{"function": {"name": n, "arguments": a}} for n, a in calls]
    return message


def _offered(messages: list[Message]) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] != "system" or "\n<tools>\n" not in first["content"]:
        return []
    listing = first["content"].rpartition("\n<tools>\n")[2].partition("\n</tools>\n")[0]
    try:
        tools = [json.loads(line) for line in listing.splitlines()]
    except ValueError:
        return []
    return [tool for tool in tools if _is_tool(tool)]


T = TypeVar("T", bound=msgspec.Struct)

Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
Top = Annotated[int, msgspec.Meta(ge=0, le=20)]
Length = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False


class Sampled(msgspec.Struct, kw_only=True):
    n: Count | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    prompt_logprobs: Top | None = None

    def stops(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]


class Body(Sampled, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    echo: bool | None = False


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = False
    top_logprobs: Top | None = 0
    response_format: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool = True


class CompletionBody(Body, kw_only=True):
    prompt: Any
    max_tokens: Length | None = 16
    logprobs: Top | bool | None = None


class GenerateBody(CompletionBody, kw_only=True):
    """Atropos's own endpoint of its example trainer's vLLM server."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def read(body: Any, kind: type[T]) -> T:
    """Converts `body` to `kind`; the `param` of an EngineRefused is the wrong field's place."""
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        words, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$.") or None
        raise refusal(f"{param or 'The body'}: {words}.", param=param) from error


def check_sampling(body: Body) -> None:
    if body.stream_options is not None and not body.stream:
        raise refusal("Stream options need `stream`.", param="stream_options")
    if body.temperature == 0 and (body.n or 1) > 1:
        raise refusal("`n` must be 1 when the temperature is 0.", param="n")
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("Prompt logprobs cannot be streamed.", param="prompt_logprobs")
    if body.echo:
        raise refusal("The simulated engine has no `echo`.", param="echo")


def check_chat(body: ChatBody, names: set[str]) -> str:
    """Returns how tools may be used: "none", "auto", "required" or the name of a required tool."""
    check_sampling(body)
    if body.top_logprobs and not body.logprobs:
        raise refusal("`top_logprobs` needs `logprobs`.", param="top_logprobs")
    if body.continue_final_message or not body.add_generation_prompt:
        raise refusal(
            "The simulated engine only begins new messages.", param="continue_final_message"
        )
    choice = body.tool_choice
    if choice is None:
        return "auto" if names else "none"
    if choice == "none":
        return "none"
    if not names:
        raise refusal("`tool_choice` needs `tools`.", param="tool_choice")
    if isinstance(choice, str):
        if choice in ("auto", "required"):
            return choice
        raise refusal(f"Unknown tool choice {choice!r}.", param="tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise refusal("`tool_choice` does not name one of the tools.", param="tool_choice")
    return str(name)
