"""Recognises that an engine refused a call because its prompt fills the model's context. Pure.

In: the engine's message, in the words of vLLM, SGLang, llama.cpp, TGI, OpenAI or other providers.
Out: LimitReached, with a message and numbers that agents' clients recognise, so that a framework
shortens its conversation.
"""

from __future__ import annotations

import re

from envserver_records.errors import EnvserverError, LimitReached

_FULL = re.compile(
    r"context[ _](?:length|size|window|limit)|max_model_len|maximum model length"
    r"|prompt is too long|maximum prompt length|input is too long|input token count"
    r"|inputs\W+must have less than|inputs\W+tokens \+ \W?max_new_tokens",
    re.I,
)
_MOST = re.compile(
    r"(?:context[ _](?:length|size|window|limit)|model length|prompt length|tokens >|must be <="
    r"|less than|tokens allowed)[^\d]{0,12}(\d+)",
    re.I,
)
_PROMPT = re.compile(
    r"\((\d+) in the messages|(\d+) (?:input tokens|tokens from the input)"
    r"|(?:input|request) \((\d+) tokens|\(length (\d+)\)|resulted in (\d+) tokens"
    r"|prompt (?:has|of) (\d+)|too long: (\d+) tokens|Given: (\d+)|contains (\d+) tokens"
    r"|token count \((\d+)\)",
    re.I,
)
_ANSWER = re.compile(
    r"(\d+) (?:in the completion|output tokens|'max_tokens'|tokens for the completion|behind)", re.I
)
_KNOWN = "This model's maximum context length is"
"""How OpenAI's message begins: clients look for it."""


def context_limit(message: str) -> LimitReached | None:
    """Returns the limit that `message`, of an engine that refused a call, is about; None: another
    reason.

    `detail`: `limit` ("context") and, where the message says them, `prompt_tokens`, `answer_tokens`
    and `context_tokens`.
    """
    if not _FULL.search(message):
        return None
    found = {
        "prompt_tokens": _number(_PROMPT, message),
        "answer_tokens": _number(_ANSWER, message),
        "context_tokens": _number(_MOST, message),
    }
    numbers = {name: number for name, number in found.items() if number is not None}
    error = LimitReached(_as_clients_know_it(message, numbers), limit="context")
    error.detail |= numbers
    return error


def is_context_limit(error: EnvserverError) -> bool:
    """Returns whether `error` says that the model's context is full."""
    return isinstance(error, LimitReached) and error.detail.get("limit") == "context"


def _number(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return int(found[found.lastindex or 0]) if found else None


def _as_clients_know_it(message: str, numbers: dict[str, int]) -> str:
    if _KNOWN.lower() in message.lower():
        return message
    prompt, most = numbers.get("prompt_tokens"), numbers.get("context_tokens")
    if prompt is None or most is None:
        return f"{_KNOWN} exceeded: {message}"
    return f"{_KNOWN} {most} tokens. However, your messages resulted in {prompt} tokens."
