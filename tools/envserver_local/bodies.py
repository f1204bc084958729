"""Request bodies and parts of responses, with each field where vLLM 0.32 puts it.

A field of a wrong type is refused with its place. An unsupported field that would change the answer
is refused by name. Any other unknown field is ignored, as in vLLM.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from envserver.models.parsers import FORMATS, Tools, detect_format

from .simulated import tokenizer
from .text import Ranked, Row, Text

Unit = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

_FOREIGN = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("use_beam_search", "prompt_embeds", "suffix", "truncate_prompt_tokens", "bad_words"),
    "logits_processors",
)


class Sampled(tokenizer.Sampled, kw_only=True):
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
    max_tokens: tokenizer.Length | None = None


class Body(Sampled, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: tokenizer.StreamOptions | None = None
    max_completion_tokens: tokenizer.Length | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of an answer; None: as many as the context leaves."""
        return self.max_completion_tokens or self.max_tokens


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False
    top_logprobs: tokenizer.Top | None = 0
    continue_final_message: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, kw_only=True):
    prompt: Any
    max_tokens: tokenizer.Length | None = 16
    logprobs: tokenizer.Top | bool | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class SamplingParams(Sampled, kw_only=True):
    """`logprobs`: number of alternatives, None for none."""

    logprobs: tokenizer.Top | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = False
    output_mode: str = "tokens"
    stream: bool | None = False
    stream_options: tokenizer.StreamOptions | None = None


class LoraBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class RpcBody(msgspec.Struct, kw_only=True):
    method: str
    kwargs: dict[str, Any] = {}


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str


class JoinBody(msgspec.Struct, kw_only=True):
    init_info: dict[str, Any]


class BucketBody(msgspec.Struct, kw_only=True):
    update_info: dict[str, Any]


class FinishBody(msgspec.Struct, kw_only=True):
    weight_version: str | None = None


class TokenizeBody(tokenizer.TokenizeBody, kw_only=True):
    """Add special tokens to plain text, as vLLM does by default."""

    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


def check(body: Body) -> None:
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
    return _refused(
        f"The local engine has no `{name}`. Leave it out, or serve the model with vLLM.", name
    )


def _refused(words: str, param: str) -> EngineRefused:
    return EngineRefused(words, status=400, param=param)


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

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[dict[str, Any]]]:
        """The content and the calls of a text. Malformed calls stay text."""
        if self._format is None:
            return text, []
        found = FORMATS[self._format](text, body.tools or [])
        if found is None:
            return text, []
        calls = found.calls[:1] if body.parallel_tool_calls is False else found.calls
        content = found.content if found.content.strip() else None
        return content, [call.message() for call in calls]


Json = dict[str, Any]


def head(prefix: str, kind: str, model: str) -> Json:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> Json:
    asked, said = sum(map(len, prompts)), sum(len(row.ids) for row in rows)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def ranked(row: Row, start: int, end: int) -> list[Ranked]:
    """For each token its id and logprob, then the requested number of most likely ones."""
    if not row.sampling.top_logprobs:
        return [[pair] for pair in zip(row.ids[start:end], row.logprobs[start:end], strict=True)]
    found = []
    for place in range(start, end):
        token = row.ids[place]
        others = [pair for pair in row.tops[place] if pair[0] != token]
        found.append([(token, row.logprobs[place]), *others])
    return found


def chat_logprobs(text: Text, row: Row, start: int, end: int, *, as_ids: bool) -> Json:
    """Logprobs in the format of chat completions, the most likely first."""

    def entry(index: int, logprob: float) -> Json:
        name = text.name(index)
        return {
            "token": f"token_id:{index}" if as_ids else name,
            "logprob": logprob,
            "bytes": list(name.encode()),
        }

    content = []
    for place in range(start, end):
        tops = row.tops[place] if row.sampling.top_logprobs else []
        content.append(
            {
                **entry(row.ids[place], row.logprobs[place]),
                "top_logprobs": [entry(*pair) for pair in tops],
            }
        )
    return {"content": content}


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


def completion_logprobs(text: Text, row: Row, start: int, end: int, *, as_ids: bool) -> Json:
    name = _named(text, as_ids)
    return _columns(
        [name(index) for index in row.ids[start:end]],
        list(row.logprobs[start:end]),
        [{name(index): value for index, value in one} for one in ranked(row, start, end)],
    )


def echoed_logprobs(text: Text, row: Row, *, as_ids: bool) -> Json:
    """Logprobs of prompt and answer in the same format; the first token has none."""
    name = _named(text, as_ids)
    own = completion_logprobs(text, row, 0, len(row.ids), as_ids=as_ids)
    scored = row.scored or []
    return _columns(
        [name(index) for index in row.prompt] + own["tokens"],
        [None, *(one[0][1] for one in scored), *own["token_logprobs"]],
        [
            None,
            *({name(index): value for index, value in one} for one in scored),
            *own["top_logprobs"],
        ],
    )


def prompt_logprobs(text: Text, row: Row) -> list[Json | None] | None:
    """Logprobs of the prompt's tokens by id, None for the first; None if not requested."""
    if row.scored is None:
        return None
    found: list[Json | None] = [None]
    for one in row.scored:
        ranks = {index: rank for rank, (index, _) in enumerate(sorted(one, key=_falling), start=1)}
        found.append(
            {
                str(index): {
                    "logprob": value,
                    "rank": ranks[index],
                    "decoded_token": text.name(index),
                }
                for index, value in one
            }
        )
    return found


def _falling(pair: tuple[int, float]) -> float:
    return -pair[1]


def _named(text: Text, as_ids: bool) -> Any:
    return (lambda index: f"token_id:{index}") if as_ids else text.name


def _columns(tokens: list[str], logprobs: list[Any], tops: list[Any]) -> Json:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }
