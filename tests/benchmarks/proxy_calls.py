"""What the benchmark of the proxy asks of a model, and what the model says: made once, as bytes.

Conversations of one question and one answer by turns. Every answer has the same 64 tokens: text,
or where there are tools a call of one. The engine's answers have the fields, and so the size, of
those of vLLM 0.32.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import orjson
import proxy_load  # noqa: F401 - finds tests/support
from support.templates import CHATML, chat_format, tool

MODEL = "tiny"
ANSWER_TOKENS = 64
END = "<|im_end|>"
FORMAT = chat_format(CHATML, stops=[END])
TOOLS = [tool("calculate"), tool("search")]
EXACT = {"return_token_ids": True, "logprobs": True, "max_tokens": 1000}
"""What an agent that records tokens by itself asks for, and the proxy in its name."""
USAGE = {"stream_options": {"include_usage": True}}

_WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "of course", "what"]
_CALL = '<tool_call>\n{"name": "calculate", "arguments": '
_CALL_END = "}\n</tool_call>"


class Answer(NamedTuple):
    """One answer; `ids` end with the token that ends the turn, which `text` lacks."""

    text: str
    ids: list[int]
    message: dict[str, Any]
    finish_reason: str


def prose(tokens: int, seed: int = 0) -> str:
    """Text of so many tokens, give or take one."""
    chance = random.Random(seed)
    words: list[str] = []
    counted = 0
    while counted < tokens:
        words.append(chance.choice(_WORDS))
        counted += len(FORMAT.encode(f" {words[-1]}"))
    return " ".join(words)


@cache
def answer(tools: bool) -> Answer:
    """What the model says, always."""
    if not tools:
        text = _filled(lambda words: words)
        return Answer(text, _ids(text), {"role": "assistant", "content": text}, "stop")
    arguments = _filled(lambda words: _CALL + _expression(words) + _CALL_END)
    arguments = arguments.removeprefix(_CALL).removesuffix(_CALL_END)
    function = {"name": "calculate", "arguments": arguments}
    called = {"id": "call00001", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    text = _CALL + arguments + _CALL_END
    return Answer(text, _ids(text), message, "tool_calls")


def _expression(words: str) -> str:
    return '{"expression": "' + words + '"}'


def _filled(form: Any) -> str:
    """`form` of as many words and letters as it takes to have `ANSWER_TOKENS` with its end."""
    for tokens in range(ANSWER_TOKENS):
        for letters in ("", " x", " x x", " xy"):
            text: str = form(prose(tokens, seed=1) + letters)
            if len(_ids(text)) == ANSWER_TOKENS:
                return text
    raise AssertionError("some number of words has as many tokens")


def _ids(text: str) -> list[int]:
    return [*FORMAT.encode(text), *FORMAT.encode(END)]


def requests(
    history_tokens: int,
    turns: int,
    *,
    tools: bool,
    streamed: bool,
    new_tokens: int = 60,
    **more: Any,
) -> list[bytes]:
    """The bodies of a conversation's requests.

    Args:
        history_tokens: of the first.
        turns: how many there are; each has one answer and one question of `new_tokens` more.
    """
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": prose(history_tokens)},
    ]
    bodies = []
    for turn in range(turns):
        body = {"model": MODEL, "messages": messages, "stream": streamed, **more}
        if tools:
            body["tools"] = TOOLS
        bodies.append(orjson.dumps(body))
        messages = [*messages, answer(tools).message, _next(tools, turn, new_tokens)]
    return bodies


def _next(tools: bool, turn: int, tokens: int) -> dict[str, Any]:
    content = prose(tokens, seed=turn)
    if tools:
        return {"role": "tool", "tool_call_id": "call00001", "content": content}
    return {"role": "user", "content": content}


# What the engine says

_PROMPT_IDS = b'"prompt_token_ids":[]'
"""In prebuilt answers the place of the prompt's ids."""


def with_prompt(data: bytes, ids: bytes) -> bytes:
    """A prebuilt answer with the prompt's `ids`, numbers between commas."""
    return data.replace(_PROMPT_IDS, _PROMPT_IDS[:-1] + ids + b"]", 1)


@cache
def chat_whole() -> bytes:
    """What /v1/chat/completions says; there are no tools."""
    said = answer(tools=False)
    choice = {
        "index": 0,
        "message": {**said.message, **_NOTHING_SAID},
        "logprobs": {"content": _scored(said.ids)},
        **_ending(said.finish_reason),
        "token_ids": said.ids,
        "routed_experts": None,
    }
    return orjson.dumps({**_head("chat.completion"), "choices": [choice], **_usage(), **_LAST})


@cache
def chat_chunks() -> list[bytes]:
    """What /v1/chat/completions streams, an event for each token; there are no tools."""
    said, head = answer(tools=False), _head("chat.completion.chunk")
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    events = [{**head, "choices": [{**first, "finish_reason": None}], "prompt_token_ids": []}]
    for token, entry, last in _tokens(said):
        choice = {
            "index": 0,
            "delta": {} if last else {"content": entry["token"]},
            "logprobs": {"content": [entry]},
            **(_ending(said.finish_reason) if last else {"finish_reason": None}),
            "token_ids": [token],
        }
        events.append({**head, "choices": [choice]})
    return _as_events([*events, {**head, "choices": [], **_usage()}])


def rendered(body: dict[str, Any]) -> bytes:
    """What /v1/chat/completions/render says."""
    sampling = {
        "temperature": body.get("temperature", 1.0),
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": [],
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "max_tokens": body.get("max_tokens"),
        "logprobs": 0,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
    }
    ids = FORMAT.prompt_ids(body["messages"], body.get("tools"), {})
    more = {"token_offsets": None, "features": None, "model": MODEL, "output_mode": "tokens"}
    more |= {"return_token_ids": None, "stream": False, "stream_options": None, "priority": 0}
    return orjson.dumps(
        {"request_id": "chatcmpl-1", "token_ids": ids, "sampling_params": sampling, **more}
    )


@cache
def generated(tools: bool) -> bytes:
    """What /inference/v1/generate says."""
    said = answer(tools)
    choice = {
        "index": 0,
        **_ending("stop"),
        "token_ids": said.ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": _versions(),
        "text": said.text,
        "logprobs": {"content": _scored(said.ids, top=True)},
    }
    return orjson.dumps({**_generated_head(), **_usage(), **_LAST, "choices": [choice]})


@cache
def generated_chunks() -> list[bytes]:
    """What /inference/v1/generate streams, an event for each token; there are no tools."""
    said, head = answer(tools=False), {"request_id": "generate-tokens-1", "usage": None}
    events: list[dict[str, Any]] = []
    for token, entry, last in _tokens(said, top=True):
        choice = {
            "index": 0,
            "finish_reason": "stop" if last else None,
            "stop_reason": None,
            "token_ids": [token],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": _versions() if last else None,
            "text": "" if last else entry["token"],
            "logprobs": {"content": [entry]},
        }
        events.append({**head, "output_mode": "text", "choices": [choice]})
    events[0]["prompt_token_ids"] = []
    return _as_events([*events, {**head, **_usage(), "output_mode": "text", "choices": []}])


@cache
def derendered(tools: bool) -> bytes:
    """What /v1/chat/completions/derender says."""
    message = {**answer(tools).message, **_NOTHING_SAID}
    choice = {"index": 0, "message": message, "logprobs": None, **_ending("stop")}
    return orjson.dumps({**_head("chat.completion"), "choices": [choice], **_usage(), **_LAST})


_NOTHING_SAID = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_LAST = {
    "prompt_logprobs": None,
    "prompt_token_ids": [],
    "prompt_text": None,
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics")),
}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-b5b3145f40b92a8a", "object": kind, "created": 1, "model": MODEL}


def _generated_head() -> dict[str, Any]:
    return {"request_id": "generate-tokens-1", "model": MODEL, "created": 1, "output_mode": "text"}


def _ending(reason: str) -> dict[str, Any]:
    return {"finish_reason": reason, "stop_reason": None}


def _versions() -> list[dict[str, Any]]:
    return [{"version": "7", "start": 0, "end": ANSWER_TOKENS}]


def _usage() -> dict[str, Any]:
    counts = {"prompt_tokens": 200, "total_tokens": 264, "completion_tokens": ANSWER_TOKENS}
    return {"usage": {**counts, "prompt_tokens_details": None}}


def _scored(ids: list[int], *, top: bool = False) -> list[dict[str, Any]]:
    """As vLLM tells logprobs; generated answers name the sampled token among the likeliest."""
    entries = []
    for place, token in enumerate(ids):
        text = "" if place + 1 == len(ids) else FORMAT.decode([token])
        logprob = -6.068752288818359 / (place + 1)
        entry: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
        entries.append({**entry, "top_logprobs": [entry] if top else []})
    return entries


def _tokens(said: Answer, *, top: bool = False) -> Iterator[tuple[int, dict[str, Any], bool]]:
    for place, (token, entry) in enumerate(zip(said.ids, _scored(said.ids, top=top), strict=True)):
        yield token, entry, place + 1 == len(said.ids)


def _as_events(chunks: list[dict[str, Any]]) -> list[bytes]:
    return [*[b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks], b"data: [DONE]\n\n"]
