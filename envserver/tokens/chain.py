"""Hashes a request's messages: one hash for each prefix.

`hashes[i]` identifies the first i messages together with everything else that affects their
rendering and answer, images by the SHA-256 of their bytes. So a request continues a recorded one
exactly if one of its hashes equals that one's last. Reasoning is left out: agents drop it, and
templates decide about it. O(messages).
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
    """Returns the BLAKE2b-128 hash before the first message and after each message.

    Args:
        kwargs: of the chat template.

    Raises:
        Refused: multimodal, unusual_message, unusual_tool: only the engine can render it.
    """
    start = [prepare_tools(list(tools)), sorted(kwargs.items()), model, agent]
    chain = [_digest(b"", start)]
    for message in prepare(list(messages), parts=False, images="named"):
        said = {name: value for name, value in message.items() if name not in _REASONING}
        chain.append(_digest(chain[-1], said))
    return chain


def _digest(before: bytes, value: Any) -> bytes:
    return blake2b(before + canonical(value).encode(), digest_size=16).digest()
