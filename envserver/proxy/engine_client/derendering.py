"""Parses sampled tokens with the engine's own parsers, by /v1/chat/completions/derender.

That endpoint decodes the ids it is given. A chat answer's text ends before its end token and before
its stop string, so these are removed first. Tool calls set the finish reason here, as in a chat
answer; the endpoint leaves that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envserver_records.errors import EngineGarbage
from envserver_records.records import Message

from .base import ChatBody, EngineSession, choices_of, has_tools, require, require_ids

DERENDER = "/v1/chat/completions/derender"
TOKENIZE = "/tokenize"

_GENERATED = "The engine's generated answer"
_WHERE = "The engine's derendered answer"
_CUT = "The engine's tokenized text"


async def derendered(
    session: EngineSession,
    body: ChatBody,
    prompt_ids: Any,
    choices: Sequence[dict[str, Any]],
    *,
    reasons: bool,
) -> list[Message]:
    """Returns the messages in `choices`, which the engine generated after `prompt_ids`.

    Sets each choice's `finish_reason` to that of a chat answer.

    Args:
        prompt_ids: as ids, or as JSON of them.
        reasons: whether the engine separates reasoning from content.

    Raises:
        EngineError: as the engine.
        EngineGarbage: the derendered answer lacks a message, or the choices have no valid ids.
    """
    texts = [await _text_ids(session, body, choice) for choice in choices]
    # The endpoint refuses empty answers; in a chat answer their content is null or empty.
    nothing = None if reasons else ""
    messages: list[Message] = [{"role": "assistant", "content": nothing} for _ in choices]
    asked = [place for place, ids in enumerate(texts) if ids]
    if asked:
        answer = await session.post(
            DERENDER,
            {
                "model": body.get("model"),
                "chat_request": body,
                "generate_response": {
                    "prompt_token_ids": prompt_ids,
                    "choices": [
                        {
                            "index": index,
                            "token_ids": texts[place],
                            "finish_reason": choices[place].get("finish_reason"),
                        }
                        for index, place in enumerate(asked)
                    ],
                },
            },
        )
        for place, choice in zip(asked, choices_of(answer, len(asked), _WHERE), strict=True):
            messages[place] = _message(require(choice, "message", dict, _WHERE))
    for choice, message in zip(choices, messages, strict=True):
        choice["finish_reason"] = _finish_reason(body, choice, message)
    return messages


async def _text_ids(session: EngineSession, body: ChatBody, choice: dict[str, Any]) -> list[int]:
    """Returns ids that decode to the text of `choice`."""
    ids = require_ids(choice, "token_ids", _GENERATED)
    if choice.get("finish_reason") != "stop":
        return ids
    if not isinstance(choice.get("stop_reason"), str):
        return ids if body.get("include_stop_str_in_output") else ids[:-1]
    if not choice["text"]:
        return []
    # The text was cut, perhaps within a token, so it is tokenised again.
    asked = {"model": body.get("model"), "prompt": choice["text"], "add_special_tokens": False}
    return require_ids(await session.post(TOKENIZE, asked), "tokens", _CUT)


def _message(message: Message) -> Message:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise EngineGarbage(f"{_WHERE} holds tool_calls that are not a list.")
    return message


def _finish_reason(body: ChatBody, choice: dict[str, Any], message: Message) -> str | None:
    reason: str | None = choice.get("finish_reason")
    wanted = body.get("tool_choice", "auto")
    if not has_tools(body):
        return reason
    if wanted in (None, "auto") and message.get("tool_calls"):
        return "tool_calls"
    return "tool_calls" if wanted == "required" and reason == "stop" else reason
