"""Requests by what they say: one hash for each prefix of their messages.

`hashes[i]` names the first i messages together with everything else that their rendering and their
answer depend on, so that a request continues a recorded one exactly where one of its hashes is that
one's last. What a template never shows (reasoning, absent fields) is left out. O(messages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ..records import Message
from .edits import answer_of

_LEFT_OUT = ("role", "content", "tool_calls", "reasoning", "reasoning_content")
"""Fields that stand in a message's normal form already, or in none."""


def hashes(
    messages: Sequence[Message],
    tools: Sequence[Any],
    *,
    kwargs: Mapping[str, Any],
    model: str,
    agent: str | None,
) -> list[bytes]:
    """BLAKE2b-128 after each of the messages, and before the first: one more than there are.

    Args:
        kwargs: of the chat template.
    """
    start = [list(tools), sorted(kwargs.items()), model, agent]
    chain = [_digest(json.dumps(start).encode())]
    for message in messages:
        chain.append(_digest(chain[-1] + normal(message)))
    return chain


def normal(message: Message) -> bytes:
    """What counts of a message: role, text, tool calls and further fields that hold anything."""
    answer = answer_of(message)
    others = [
        (name, message[name])
        for name in sorted(message)
        if name not in _LEFT_OUT and message[name] not in (None, "", [], {})
    ]
    return json.dumps([message.get("role"), answer, others]).encode()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
