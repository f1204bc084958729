"""What the benchmark of the proxy asks of a model, and what the model says: made once, as bytes.

Conversations of one question and one answer by turns. Every answer has the same 64 tokens: text,
or where there are tools a call of one. The engine's answers have the fields, and so the size, of
those of vLLM 0.32.
"""

import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

sys.path.insert(0, str(Path(__file__).parent.parent))
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
        return Answer(text, _ids(text), {"role": "assistant", "content": text})
    arguments = _filled(lambda words: _CALL + _expression(words) + _CALL_END)
    arguments = arguments.removeprefix(_CALL).removesuffix(_CALL_END)
    function = {"name": "calculate", "arguments": arguments}
    called = {"id": "call00001", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    text = _CALL + arguments + _CALL_END
    return Answer(text, _ids(text), message)


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


_FORMS = orjson.loads(Path(__file__).with_name("proxy_answers.json").read_bytes())
"""Answers of vLLM 0.32 without what is sampled."""


def _form(name: str, **values: Any) -> dict[str, Any]:
    return {**_FORMS[name], **values}


@cache
def chat_whole() -> bytes:
    """What /v1/chat/completions says; there are no tools."""
    said = answer(tools=False)
    logprobs, message = {"content": _scored(said.ids)}, {**said.message, **_form("unsaid")}
    choice = _form("chat_choice", message=message, logprobs=logprobs, token_ids=said.ids)
    return orjson.dumps(_form("chat", choices=[choice]))


@cache
def chat_chunks() -> list[bytes]:
    """What /v1/chat/completions streams, an event for each token; there are no tools."""
    events = [_form("chat_chunk", choices=[_form("chat_first")], prompt_token_ids=[])]
    for token, entry, last in _tokens(answer(tools=False)):
        choice = {
            "index": 0,
            "delta": {} if last else {"content": entry["token"]},
            "logprobs": {"content": [entry]},
            **({"finish_reason": "stop", "stop_reason": None} if last else {"finish_reason": None}),
            "token_ids": [token],
        }
        events.append(_form("chat_chunk", choices=[choice]))
    return _as_events([*events, _form("chat_chunk", choices=[], usage=_FORMS["usage"])])


def rendered(body: dict[str, Any]) -> bytes:
    """What /v1/chat/completions/render says."""
    asked = {name: body[name] for name in ("temperature", "max_tokens") if name in body}
    sampling = {**_FORMS["rendered"]["sampling_params"], **asked}
    ids = FORMAT.prompt_ids(body["messages"], body.get("tools"), {})
    return orjson.dumps(_form("rendered", token_ids=ids, sampling_params=sampling))


@cache
def generated(tools: bool) -> bytes:
    """What /inference/v1/generate says."""
    said = answer(tools)
    logprobs = {"content": _scored(said.ids, top=True)}
    choice = _form("generated_choice", token_ids=said.ids, text=said.text, logprobs=logprobs)
    return orjson.dumps(_form("generated", choices=[choice]))


@cache
def generated_chunks() -> list[bytes]:
    """What /inference/v1/generate streams, an event for each token; there are no tools."""
    events: list[dict[str, Any]] = []
    for token, entry, last in _tokens(answer(tools=False), top=True):
        sampled = {"token_ids": [token], "logprobs": {"content": [entry]}}
        if not last:
            sampled |= {"text": entry["token"], "finish_reason": None, "weight_versions": None}
        events.append(_form("generated_chunk", choices=[_form("generated_choice", **sampled)]))
    events[0]["prompt_token_ids"] = []
    return _as_events([*events, _form("generated_chunk", choices=[], usage=_FORMS["usage"])])


@cache
def derendered(tools: bool) -> bytes:
    """What /v1/chat/completions/derender says."""
    choice = _form("derendered_choice", message={**answer(tools).message, **_form("unsaid")})
    return orjson.dumps(_form("chat", choices=[choice]))


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
