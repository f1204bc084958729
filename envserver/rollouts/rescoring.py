"""Asks the engine again for the logprobs of tokens that it sampled before.

A row's token ids go to `/v1/completions` as the prompt, with `prompt_logprobs`; nothing of the row
is rendered or tokenized again. In float32 on a CPU, with one request at a time, vLLM returns
exactly the numbers that it gave when it sampled; on a GPU kernels and batches differ, and so do the
last digits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from envserver_records.errors import EngineGarbage, EngineRefused
from envserver_records.images import RowImage
from envserver_records.records import Logprobs, Tokens

from ..models.engine import Engine
from ..tokens.images import folded, url_from

_PATH: Final = "/v1/completions"
_GENERATE: Final = "/inference/v1/generate"
_PROBE_TEMPERATURE: Final = 2.0
_PROBE_CONTEXT: Final = 64
_PROBE_TOKENS: Final = 32
_PROBE_DIFFERENCE: Final = 0.2
"""Separates raw from processed logprobs: rounding errors are far smaller.

At the highest temperature that vLLM accepts, the logprobs of 32 tokens differ by nats from the raw
ones, even for a model that was certain at first.
"""


class Rescorer:
    """Asks `engine` for logprobs of given tokens."""

    def __init__(self, engine: Engine, *, timeout_seconds: float = 600.0) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._lock = asyncio.Lock()
        self._context: int | None = None
        self._context_known = False
        self._raw: bool | None = None

    async def context(self) -> int | None:
        """Returns the maximum tokens of prompt and answer together; None: the engine does not say.
        Raises EngineError: it does not answer.
        """
        async with self._lock:
            if not self._context_known:
                self._context = await self._ask_for_context()
                self._context_known = True
        return self._context

    async def score(self, tokens: Tokens, images: Sequence[RowImage] = ()) -> Logprobs:
        """Returns float32[T]: the logprob of each token given those before it; 0 for the first.

        Args:
            images: those among `tokens`. Their tokens' own logprobs mean nothing.

        Raises:
            EngineRefused: the engine does not accept these tokens.
            EngineGarbage: its answer is about other tokens, or lacks numbers.
            EngineError: it failed.
        """
        if images:
            return await self._score_with(tokens, images)
        choice = await self._complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != tokens.tolist():
            raise EngineGarbage("The engine scored another prompt than it was sent.")
        return _prompt_logprobs(choice, tokens)

    async def _score_with(self, tokens: Tokens, images: Sequence[RowImage]) -> Logprobs:
        """Scores a row with images. `/v1/completions` would ignore them without an error."""
        ranges = [(one.offset, one.length) for one in images]
        token = _placeholder(tokens, images[0])
        urls = [url_from(one.data) for one in images]
        body = {
            "model": await self._engine.model_name(),
            "token_ids": folded(tokens.tolist(), ranges, token),
            "content_parts": [{"type": "image_url", "url": url} for url in urls],
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
            "return_token_ids": True,
        }
        answer = await self._engine.post(
            _GENERATE, body, rollout_id="", timeout_seconds=self._timeout_seconds
        )
        if answer.get("prompt_token_ids") != tokens.tolist():
            raise EngineGarbage("The engine makes other tokens of the row's images now.")
        return _prompt_logprobs(answer, tokens)

    async def takes(self, length: int) -> bool:
        """Returns whether the engine accepts a prompt of `length` tokens.

        If so, it refused a row because of its token ids.
        Raises EngineError: it failed.
        """
        try:
            await self.score(np.zeros(length, np.int32))
        except EngineRefused:
            return False
        return True

    async def is_raw(self, context: Tokens) -> bool:
        """Returns whether sampled logprobs are raw (before the temperature), as those of `score`.

        Determined once, by sampling after `context`.
        Raises EngineError: it failed.
        """
        async with self._lock:
            if self._raw is None:
                self._raw = await self._probe(context)
        return self._raw

    async def _probe(self, context: Tokens) -> bool:
        context = context[:_PROBE_CONTEXT]
        choice = await self._complete(
            context, max_tokens=_PROBE_TOKENS, temperature=_PROBE_TEMPERATURE, logprobs=0, seed=0
        )
        try:
            sampled = np.array(choice["token_ids"], np.int32)
            said = np.array(choice["logprobs"]["token_logprobs"], np.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineGarbage("The engine's sample has no ids or logprobs.") from error
        scored = (await self.score(np.concatenate([context, sampled])))[len(context) :]
        if said.shape != scored.shape:
            raise EngineGarbage("The engine's sample has not as many logprobs as ids.")
        return bool(np.abs(said - scored).max(initial=0.0) < _PROBE_DIFFERENCE)

    async def _complete(self, prompt: Tokens, **fields: Any) -> dict[str, Any]:
        body = {
            "model": await self._engine.model_name(),
            "prompt": prompt.tolist(),
            "return_token_ids": True,
            **fields,
        }
        answer = await self._engine.post(
            _PATH, body, rollout_id="", timeout_seconds=self._timeout_seconds
        )
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise EngineGarbage("The engine's answer has no choice.")
        return choice

    async def _ask_for_context(self) -> int | None:
        model = await self._engine.model_name()
        try:
            listed = (await self._engine.get("/v1/models")).get("data")
        except EngineRefused:
            return None  # an engine that lists no models may still answer
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict) and entry.get("id") == model:
                length = entry.get("max_model_len")
                return length if isinstance(length, int) else None
        return None


def _placeholder(tokens: Tokens, image: RowImage) -> int:
    """Returns the token that stands for an image: the most frequent one of its range."""
    shown = tokens[image.offset : image.offset + image.length]
    values, counts = np.unique(shown, return_counts=True)
    return int(values[counts.argmax()])


def _prompt_logprobs(choice: dict[str, Any], tokens: Tokens) -> Logprobs:
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise EngineGarbage("The engine gives no prompt_logprobs.", hint="vLLM gives them.")
    logprobs = np.zeros(len(tokens), np.float32)
    try:
        for place, token in enumerate(tokens.tolist()[1:], 1):
            logprobs[place] = entries[place][str(token)]["logprob"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineGarbage(f"The engine gives no logprob for token {place} of a row.") from error
    if not np.isfinite(logprobs).all():
        raise EngineGarbage("The engine returned a logprob that is not a number.")
    return logprobs
