"""Requests to both engines of this package, in vLLM's form: bodies, and what is wrong with one."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from envserver_records.tasks import Json

from .tokenizer import refusal

T = TypeVar("T", bound=msgspec.Struct)

Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
Top = Annotated[int, msgspec.Meta(ge=0, le=20)]
Length = Annotated[int, msgspec.Meta(ge=1)]
Unit = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False


class Sampled(msgspec.Struct, kw_only=True):
    """Fields of all sampling endpoints; None: the value of the model's generation config."""

    n: Count | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    prompt_logprobs: Top | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    max_tokens: Length | None = None

    def stops(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]


class Body(Sampled, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Length | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    echo: bool | None = False

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None: as many as the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class ChatBody(Body, kw_only=True):
    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    top_logprobs: Top | None = 0
    response_format: Json | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: Json | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, kw_only=True):
    prompt: Any
    max_tokens: Length | None = 16
    logprobs: Top | bool | None = None
    add_special_tokens: bool = True


class GenerateBody(CompletionBody, kw_only=True):
    """Atropos's own endpoint of its example trainer's vLLM server."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def read(body: Any, kind: type[T]) -> T:
    """The `param` of an EngineRefused is the wrong field's place."""
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
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise refusal("`top_logprobs` needs `logprobs`.", param="top_logprobs")


def check_chat(body: ChatBody, names: set[str]) -> str:
    """How tools may be used: "none", "auto", "required" or the name of a required tool."""
    check_sampling(body)
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
