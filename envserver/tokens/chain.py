"""Hashes a request's messages: one hash for each prefix.

`hashes[i]` identifies the first i messages together with everything else that affects their
rendering and answer, images by the SHA-256 of their bytes. So a request continues a recorded one
exactly if one of its hashes equals that one's last. Reasoning is left out: agents drop it, and
templates decide about it. O(messages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from envserver_records.records import Message

from .edits import canonical
from .prepare import prepare, prepare_tools, same_objects

_encode = msgspec.msgpack.Encoder().encode
_NOT_MSGPACK = b"\xc1"
"""A byte that no MessagePack begins with."""
_REASONING = ("reasoning", "reasoning_content")


class RequestHashes:
    """The hashes of one attempt's requests.

    What a request shares with the one before, the same objects, is not hashed again: a long
    conversation costs what is new in each turn.
    """

    def __init__(self) -> None:
        self._before: _Hashed | None = None

    def of(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        model: str,
        agent: str | None,
    ) -> list[bytes]:
        """Returns the BLAKE2b-128 hash before the first message and after each message.

        Args:
            messages, tools: not changed later.
            kwargs: of the chat template.

        Raises:
            Refused: multimodal, unusual_message, unusual_tool: only the engine can render it.
        """
        before, about = self._before, (model, agent)
        # Variables that are equal may be written differently: 1 and true.
        if before and before.about == about and before.tools is tools and not kwargs:
            chain = before.chain[: same_objects(before.messages, messages) + 1]
        else:
            start = [prepare_tools(list(tools)), sorted(kwargs.items()), model, agent]
            chain = [_digest(b"", start)]
        for message in prepare([*messages[len(chain) - 1 :]], parts=False, images="named"):
            said = {name: value for name, value in message.items() if name not in _REASONING}
            chain.append(_digest(chain[-1], said))
        self._before = None if kwargs else _Hashed(messages, tools, about, chain)
        return chain


class _Hashed(NamedTuple):
    """A request without variables, and its hashes; `about`: its model and agent."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    about: tuple[str, str | None]
    chain: list[bytes]


def hashes(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    *,
    kwargs: Mapping[str, Any],
    model: str,
    agent: str | None,
) -> list[bytes]:
    """Returns the hashes of one request, see `RequestHashes.of`."""
    return RequestHashes().of(messages, tools, kwargs=kwargs, model=model, agent=agent)


def _digest(before: bytes, value: Any) -> bytes:
    try:
        told = _encode(value)
    except (ValueError, OverflowError):  # half a surrogate pair, a number of over 64 bits
        told = _NOT_MSGPACK + canonical(value).encode()
    return blake2b(before + told, digest_size=16).digest()
