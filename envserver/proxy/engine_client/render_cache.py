"""What vLLM makes of a chat request besides its prompt: kept, so that it is asked for once.

An engine has defaults and rules of its own (its generation config, grammars for tools, what a tool
parser needs to see). Rather than to copy them we ask: /v1/chat/completions/render answers with the
complete request for /inference/v1/generate. Of calls that differ only in messages, seed and limit
all but the prompt is the same, so that a continued call needs no rendering.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import orjson

from .base import ChatAnswer, ChatBody, max_tokens, require

_OF_ONE_CALL = frozenset({"messages", "seed", "max_tokens", "max_completion_tokens"})
_MOST_FRAMES = 256
_WHERE = "The engine's rendered request"


class RenderCache:
    """Rendered requests without their prompts, the last used last."""

    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def learn(self, body: ChatBody, rendered: ChatAnswer) -> None:
        """Keeps what `rendered`, the checked rendering of `body`, tells of all such bodies."""
        if rendered["sampling_params"].get("structured_outputs") is not None:
            # Where a grammar begins to hold depends on how the prompt ends.
            return
        self._cache[_key(body)] = {
            name: rendered[name]
            for name in rendered
            if name not in ("request_id", "token_ids", "features")
        }
        if len(self._cache) > _MOST_FRAMES:
            self._cache.popitem(last=False)

    def request(self, body: ChatBody, ids: Sequence[int]) -> ChatBody | None:
        """The request for `body` with the prompt `ids`, None when no such body was rendered."""
        key = _key(body)
        frame = self._cache.get(key)
        if frame is None:
            return None
        self._cache.move_to_end(key)
        return with_prompt(frame, body, ids)


def with_prompt(rendered: ChatAnswer, body: ChatBody, ids: Sequence[int]) -> ChatBody:
    """A rendered request with another prompt, and with the seed and limit of `body`.

    The rendered limit is what the rendered prompt left of the context; without one the engine
    takes what the real prompt leaves.
    """
    sampling = dict(rendered["sampling_params"])
    for name, value in (("max_tokens", max_tokens(body)), ("seed", body.get("seed"))):
        sampling.pop(name, None)
        if value is not None:
            sampling[name] = value
    request = {**rendered, "token_ids": list(ids), "sampling_params": sampling}
    request.pop("request_id", None)
    return request


def check_rendered(rendered: ChatAnswer) -> None:
    """
    Raises:
        EngineGarbage: `rendered` is no request with a prompt.
    """
    require(rendered, "token_ids", list, _WHERE)
    require(rendered, "sampling_params", dict, _WHERE)


def _key(body: ChatBody) -> bytes:
    shared = {name: body[name] for name in body if name not in _OF_ONE_CALL}
    data = orjson.dumps(shared, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()
