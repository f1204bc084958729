"""Recognises that an engine refused a call because its prompt fills the model's context. Pure.

In: the engine's message, in the words of vLLM, SGLang, llama.cpp, TGI, OpenAI or other providers.
Out: LimitReached, with a message and numbers that agents' clients recognise, so that a framework
shortens its conversation.
"""

from __future__ import annotations

import re

from envserver_records.errors import EnvserverError, LimitReached

_SEQ_LEN = (
    r"max\w*[ _]seq(?:uence)?[ _]?len(?:gth)?|exceed\w*(?: the)? seq(?:uence)?[ _]?len(?:gth)?"
)
_FULL = re.compile(
    r"context[ _](?:length|size|window|limit)|max_model_len|maximum model length"
    r"|prompt is too long|maximum prompt length|input is too long|input token count"
    rf"|inputs\W+must have less than|inputs\W+tokens \+ \W?max_new_tokens|{_SEQ_LEN}",
    re.I,
)
_SUM = re.compile(r"(\d+) \+ (\d+) > (\d+)")
"""Prompt, answer and most: Anthropic's words."""
_MOST = re.compile(
    r"(?:context[ _](?:length|size|window|limit)|model length|maximum prompt length"
    rf"|\d(?: tokens)? >|must be <=|less than|tokens allowed|{_SEQ_LEN})[^\d]{{0,12}}(\d++)(?! >)",
    re.I,
)
_PROMPT = re.compile(
    r"\((\d+) in the messages|(\d+) (?:input tokens|tokens from the input)"
    r"|(?:input|request) \((\d+) tokens|\(length (\d+)\)|resulted in (\d+) tokens"
    r"|prompt (?:has|of) (\d+)|(\d+)(?: tokens)? > \d|Given: (\d+)|contains (\d+) tokens"
    r"|(?:token count|tokens) \((\d+)\)|(?:prompt|input) length (\d+)",
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
    together = _SUM.search(message)
    prompt, answer, most = (
        map(int, together.groups())
        if together
        else (_number(one, message) for one in (_PROMPT, _ANSWER, _MOST))
    )
    found = {"prompt_tokens": prompt, "answer_tokens": answer, "context_tokens": most}
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
    answer = numbers.get("answer_tokens")
    if answer is not None and prompt <= most:
        asked = f"you requested {prompt + answer} tokens ({prompt} in the messages, {answer} in the"
        return f"{_KNOWN} {most} tokens. However, {asked} completion)."
    return f"{_KNOWN} {most} tokens. However, your messages resulted in {prompt} tokens."
