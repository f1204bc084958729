"""Request bodies of the endpoints, beyond those shared with the simulated engine.

A field of a wrong type is refused with its place. An unsupported field that would change the answer
is refused by name. Any other unknown field is ignored, as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from envserver_records.errors import EngineRefused

from envserver_local.simulated import conversation

Unit = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

_FOREIGN = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "use_beam_search",
    "prompt_embeds",
    "suffix",
    "truncate_prompt_tokens",
    "bad_words",
    "logits_processors",
)


class Sampled(conversation.Sampled, kw_only=True):
    """Fields of all sampling endpoints; None: the value of the model's generation config."""

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
    max_tokens: conversation.Length | None = None


class Body(Sampled, kw_only=True):
    """Fields shared by chat and completions."""

    model: str | None = None
    stream: bool | None = False
    stream_options: conversation.StreamOptions | None = None
    max_completion_tokens: conversation.Length | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None: as many as the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class ChatBody(Body, kw_only=True):
    """See vLLM's chat completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    top_logprobs: conversation.Top | None = 0
    continue_final_message: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, kw_only=True):
    """See vLLM's completions."""

    prompt: Any
    max_tokens: conversation.Length | None = 16
    logprobs: conversation.Top | bool | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class SamplingParams(Sampled, kw_only=True):
    """Sampling settings of a request for ids; `logprobs`: number of alternatives, None for none."""

    logprobs: conversation.Top | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of /inference/v1/generate: ids in, ids out."""

    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = False
    output_mode: str = "tokens"
    stream: bool | None = False
    stream_options: conversation.StreamOptions | None = None


class LoraBody(msgspec.Struct, kw_only=True):
    """Body of the routes that load and unload adapters."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class RpcBody(msgspec.Struct, kw_only=True):
    """Body of /collective_rpc."""

    method: str
    kwargs: dict[str, Any] = {}


class VersionBody(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version."""

    new_version: str


class JoinBody(msgspec.Struct, kw_only=True):
    """Body of /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class BucketBody(msgspec.Struct, kw_only=True):
    """Body of /update_weights."""

    update_info: dict[str, Any]


class FinishBody(msgspec.Struct, kw_only=True):
    """Body of /finish_weight_update."""

    weight_version: str | None = None


class TokenizeBody(conversation.TokenizeBody, kw_only=True):
    """Add special tokens to plain text, as vLLM does by default."""

    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


def check(body: Body) -> None:
    """Checks rules between fields. Raises EngineRefused: a rule is broken."""
    if body.stream_options is not None and not body.stream:
        raise _refused("Stream options need `stream`.", "stream_options")
    if body.temperature == 0 and (body.n or 1) > 1:
        raise _refused("`n` must be 1 when the temperature is 0.", "n")
    if body.stream and body.prompt_logprobs is not None:
        raise _refused("Prompt logprobs cannot be streamed.", "prompt_logprobs")
    if isinstance(body, CompletionBody):
        if body.stream and body.echo:
            raise _refused("An echo cannot be streamed.", "echo")
    elif isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise _refused("`top_logprobs` needs `logprobs`.", "top_logprobs")
        if body.tool_choice not in (None, "none", "auto"):
            raise _refused(
                "The local engine cannot force a call: `tool_choice` is auto or none.",
                "tool_choice",
            )


def refuse_foreign(body: Any) -> None:
    """Refuses features that this engine does not support.
    Raises EngineRefused: the body uses one.
    """
    if not isinstance(body, dict):
        raise EngineRefused("The body must be a JSON object.", status=400)
    for name in _FOREIGN:
        if body.get(name):
            raise _foreign(name)
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        raise _foreign("response_format")


def _foreign(name: str) -> EngineRefused:
    return _refused(
        f"The local engine has no `{name}`. Leave it out, or serve the model with vLLM.", name
    )


def _refused(words: str, param: str) -> EngineRefused:
    return EngineRefused(words, status=400, param=param)
