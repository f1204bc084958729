"""Request bodies and parts of responses, with each field where vLLM 0.32 puts it.

A field of a wrong type is refused with its place. An unsupported field that would change the answer
is refused by name. Any other unknown field is ignored, as in vLLM.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.records import Json, Message

from envserver.models.parsers import FORMATS, Tools, detect_format

from .simulated.requests import (
    Body,
    ChatBody,
    CompletionBody,
    Sampled,
    StreamOptions,
    Top,
    check_sampling,
)
from .simulated.responses import ranked
from .simulated.tokenizer import refusal
from .text import Row, Text

_FOREIGN = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("use_beam_search", "prompt_embeds", "suffix", "truncate_prompt_tokens", "bad_words"),
    "logits_processors",
)


class SamplingParams(Sampled, kw_only=True):
    """`logprobs`: number of alternatives, None for none."""

    logprobs: Top | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = False
    output_mode: str = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class LoraBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class RpcBody(msgspec.Struct, kw_only=True):
    method: str
    kwargs: Json = {}


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str


class JoinBody(msgspec.Struct, kw_only=True):
    init_info: Json


class BucketBody(msgspec.Struct, kw_only=True):
    update_info: Json


class FinishBody(msgspec.Struct, kw_only=True):
    weight_version: str | None = None


def check(body: Body) -> None:
    check_sampling(body)
    if isinstance(body, CompletionBody):
        if body.stream and body.echo:
            raise refusal("An echo cannot be streamed.", param="echo")
    elif isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        raise refusal(
            "The local engine cannot force a call: `tool_choice` is auto or none.",
            param="tool_choice",
        )


def refuse_foreign(body: Any) -> None:
    """Refuses features that this engine does not support."""
    if not isinstance(body, dict):
        raise EngineRefused("The body must be a JSON object.", status=400)
    for name in _FOREIGN:
        if body.get(name):
            raise _foreign(name)
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        raise _foreign("response_format")


def _foreign(name: str) -> EngineRefused:
    return refusal(
        f"The local engine has no `{name}`. Leave it out, or serve the model with vLLM.", param=name
    )


class CallReader:
    """Reads tool calls from text.

    `known`: the model writes calls in a known format; if not, all of its answer is text, as from an
    engine without a parser.
    """

    def __init__(self, text: Text) -> None:
        def written(messages: list[Message], tools: Tools) -> str | None:
            try:
                return text.prompt_text(messages, tools, {"add_generation_prompt": False})
            except EngineRefused:
                return None

        self._format = detect_format(written)
        self.known = self._format is not None

    def free(self, body: ChatBody) -> bool:
        """Whether the model may call a tool, in a format that can be parsed."""
        return self.known and bool(body.tools) and body.tool_choice in (None, "auto")

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[Json]]:
        """The content and the calls of a text. Malformed calls stay text."""
        if self._format is None:
            return text, []
        found = FORMATS[self._format](text, body.tools or [])
        if found is None:
            return text, []
        calls = found.calls[:1] if body.parallel_tool_calls is False else found.calls
        content = found.content if found.content.strip() else None
        return content, [call.message() for call in calls]


def head(prefix: str, kind: str, model: str) -> Json:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def token_logprobs(row: Row, start: int, end: int) -> Json:
    """Logprobs in the format of responses with ids only: the sampled token first."""

    def entry(index: int, logprob: float) -> Json:
        return {"token_id": index, "logprob": logprob, "rank": None}

    return {
        "content": [
            {**entry(*tokens[0]), "top_logprobs": [entry(*pair) for pair in tokens]}
            for tokens in ranked(row, start, end)
        ]
    }
