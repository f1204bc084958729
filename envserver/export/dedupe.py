"""Finds duplicate rollouts.

Two rollouts are equal if their conversations are: role, text and calls of each message, with white
space normalised and the keys of arguments in any order. Without conversations the tokens are
compared, without tokens the outputs. Each takes 16 bytes of memory.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from typing import Any

import orjson
from envserver_records.records import Message, text_of

from .stored import StoredRollout


class Seen:
    """The rollouts seen so far."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, rollout: StoredRollout) -> bool:
        """Remembers `rollout`; returns whether it is new."""
        before = len(self._digests)
        self._digests.add(digest_of(rollout))
        return len(self._digests) > before


def digest_of(rollout: StoredRollout) -> bytes:
    """Returns 16 bytes, equal for equal rollouts of the same environment."""
    content: Any
    if rollout.messages:
        conversations = [rollout.messages, *(other.get("messages") for other in rollout.others)]
        content = [[_message(one) for one in messages or []] for messages in conversations]
    elif rollout.rows:
        content = [row.tokens.tolist() for row in rollout.rows]
    else:
        content = [rollout.task_id, rollout.output]
    data = orjson.dumps([rollout.env, content], default=str, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()


def _message(message: Message) -> list[Any]:
    calls = [
        (function.get("name"), _arguments(function.get("arguments")))
        for call in message.get("tool_calls") or ()
        if isinstance(function := call.get("function"), dict)
    ]
    return [message.get("role"), normal(text_of(message)), calls]


def normal(text: str) -> str:
    """Returns `text` with single spaces between words, in one Unicode form."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
