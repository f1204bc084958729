"""The request bodies of the endpoints. Fields without effect here (such as top_p) are ignored, as
vLLM ignores unknown ones; a field of a wrong type is refused with its place.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from .conversation import refusal

T = TypeVar("T", bound=msgspec.Struct)

Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
Top = Annotated[int, msgspec.Meta(ge=0, le=20)]
Length = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False


class Sampled(msgspec.Struct, kw_only=True):
    """Fields of all sampling endpoints."""

    n: Count | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    prompt_logprobs: Top | None = None

    def stops(self) -> list[str]:
        """The stop strings, without empty ones."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]


class Body(Sampled, kw_only=True):
    """Fields of the endpoints for texts."""

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
    """Converts `body` to `kind`.
    Raises EngineRefused: something is missing or of a wrong type; `param` is its place.
    """
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        words, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$.") or None
        raise refusal(f"{param or 'The body'}: {words}.", param=param) from error


def check_sampling(body: Body) -> None:
    """Checks rules between fields. Raises EngineRefused: a rule is broken."""
    if body.stream_options is not None and not body.stream:
        raise refusal("Stream options need `stream`.", param="stream_options")
    if body.temperature == 0 and (body.n or 1) > 1:
        raise refusal("`n` must be 1 when the temperature is 0.", param="n")
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("Prompt logprobs cannot be streamed.", param="prompt_logprobs")
    if body.echo:
        raise refusal("The simulated engine has no `echo`.", param="echo")


def check_chat(body: ChatBody, names: set[str]) -> str:
    """Returns how tools may be used: "none", "auto", "required" or the name of a required tool.
    Raises EngineRefused: the request contradicts itself or names a tool that it does not have.
    """
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
