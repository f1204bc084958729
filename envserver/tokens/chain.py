"""Requests by what they say: one hash for each prefix of their messages.

`hashes[i]` names the first i messages together with everything else that their rendering and their
answer depend on, so that a request continues a recorded one exactly where one of its hashes is that
one's last. Reasoning is left out: agents drop it, templates decide what becomes of it. O(messages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from envserver_records.records import Message

from .edits import canonical
from .prepare import prepare, prepare_tools

_REASONING = ("reasoning", "reasoning_content")


def hashes(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    *,
    kwargs: Mapping[str, Any],
    model: str,
    agent: str | None,
) -> list[bytes]:
    """BLAKE2b-128 before the first message and after each: one more than there are messages.

    Args:
        kwargs: of the chat template.

    Raises:
        Refused: multimodal, unusual_message, unusual_tool: only the engine can render it.
    """
    start = [prepare_tools(list(tools)), sorted(kwargs.items()), model, agent]
    chain = [_digest(b"", start)]
    for message in prepare(list(messages), parts=False):
        said = {name: value for name, value in message.items() if name not in _REASONING}
        chain.append(_digest(chain[-1], said))
    return chain


def _digest(before: bytes, value: Any) -> bytes:
    return blake2b(before + canonical(value).encode(), digest_size=16).digest()
