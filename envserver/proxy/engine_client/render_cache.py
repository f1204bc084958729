"""Caches what vLLM adds to a chat request besides its prompt.

An engine has defaults and rules of its own (its generation config, grammars for tools, needs of a
tool parser). These are not copied here: /v1/chat/completions/render returns the complete request
for /inference/v1/generate. For calls that differ only in messages, seed and limit, everything but
the prompt is the same, so a continued call needs no rendering.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import orjson

from .base import EXPERTS_START, ChatAnswer, ChatBody, max_tokens, require

_OF_ONE_CALL = frozenset({"messages", "seed", "max_tokens", "max_completion_tokens", EXPERTS_START})
_MOST_FRAMES = 256
_WHERE = "The engine's rendered request"


class RenderCache:
    """Rendered requests without their prompts; the least recently used is dropped first."""

    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def learn(self, body: ChatBody, rendered: ChatAnswer) -> None:
        """Caches `rendered`, the checked rendering of `body`, for all bodies like it."""
        if rendered["sampling_params"].get("structured_outputs") is not None:
            # Where a grammar starts to apply depends on the end of the prompt.
            return
        self._cache[_key(body)] = {
            name: rendered[name]
            for name in rendered
            if name not in ("request_id", "token_ids", "features")
        }
        if len(self._cache) > _MOST_FRAMES:
            self._cache.popitem(last=False)

    def request(self, body: ChatBody, ids: list[int]) -> ChatBody | None:
        """Returns the request for `body` with the prompt `ids`, or None if no such body is
        cached."""
        key = _key(body)
        frame = self._cache.get(key)
        if frame is None:
            return None
        self._cache.move_to_end(key)
        return with_prompt(frame, body, ids)


def with_prompt(rendered: ChatAnswer, body: ChatBody, ids: list[int]) -> ChatBody:
    """Returns a rendered request with another prompt, and with the seed, limit and so on of `body`.

    The rendered limit is what the rendered prompt leaves of the context. It is removed, so that the
    engine uses what the real prompt leaves.
    """
    sampling = dict(rendered["sampling_params"])
    own = {name: body.get(name) for name in ("seed", EXPERTS_START)}
    for name, value in {**own, "max_tokens": max_tokens(body)}.items():
        sampling.pop(name, None)
        if value is not None:
            sampling[name] = value
    request = {**rendered, "token_ids": ids, "sampling_params": sampling}
    request.pop("request_id", None)
    return request


def check_rendered(rendered: ChatAnswer) -> None:
    """
    Raises:
        EngineGarbage: `rendered` is not a request with a prompt.
    """
    require(rendered, "token_ids", list, _WHERE)
    require(rendered, "sampling_params", dict, _WHERE)


def _key(body: ChatBody) -> bytes:
    shared = {name: body[name] for name in body if name not in _OF_ONE_CALL}
    data = orjson.dumps(shared, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()
