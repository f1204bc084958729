"""Rollouts that say the same as one before them.

Two are the same where their conversations are: role, text and calls of each message, however blanks
stand in them and in whatever order the keys of arguments come. Without conversations the tokens are
compared, without those what was returned. Of each only 16 bytes are remembered.
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
    """What came before."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, rollout: StoredRollout) -> bool:
        """Remembers `rollout`; whether it is new."""
        before = len(self._digests)
        self._digests.add(digest_of(rollout))
        return len(self._digests) > before


def digest_of(rollout: StoredRollout) -> bytes:
    """16 bytes, the same for rollouts that say the same in the same environment."""
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
    """`text` with one blank between words, in one form of Unicode."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
