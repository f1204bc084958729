"""Turns a request into rows and waits for them; shared by the routes.

A request's model is the engine's own name or an adapter's. If the client hangs up or the server
stops, the request's rows leave the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from envserver_records.errors import EngineRefused

from .bodies import Sampled
from .rows import Row, Sampling
from .runner import Runner
from .text import Text
from .weights import Adapter, Adapters


class Asking:
    """Makes rows from requests.

    Args:
        model: the name under which the model is served.
        root: its folder or its name on the hub.
        most_tokens: maximum number of tokens of a prompt and its answer together.
        vocabulary: number of ids of the model; it may exceed the tokenizer's, and all can be
            sampled.
        defaults: sampling settings of the model's generation config, by their API names.
    """

    def __init__(
        self,
        runner: Runner,
        text: Text,
        adapters: Adapters,
        *,
        model: str,
        root: str,
        most_tokens: int,
        vocabulary: int,
        defaults: dict[str, float],
    ) -> None:
        self.runner = runner
        self.text = text
        self.adapters = adapters
        self.model = model
        self.root = root
        self.most_tokens = most_tokens
        self.vocabulary = vocabulary
        self._defaults = defaults

    def adapter(self, name: str | None) -> Adapter | None:
        """Returns the adapter that a model name refers to; None for the model itself."""
        if name in (None, "", self.model):
            return None
        found = self.adapters.find(str(name))
        if found is None:
            raise EngineRefused(f"The model `{name}` does not exist.", status=404, param="model")
        return found

    def check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise EngineRefused("The prompt is empty.", status=400, param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise EngineRefused(
                f"Token ids must be in 0 to {self.vocabulary - 1}.", status=400, param="prompt"
            )
        if len(ids) >= self.most_tokens:
            raise EngineRefused(
                f"This model's maximum context length is {self.most_tokens} tokens, and the prompt "
                f"has {len(ids)}. Send a shorter prompt.",
                status=400,
                param="prompt",
            )

    def sampling(
        self, body: Sampled, prompt: Sequence[int], *, limit: int | None, top: int, raw: bool
    ) -> Sampling:
        """Returns the sampling settings of `body` for `prompt`.

        Args:
            limit: maximum number of tokens of the answer, None: all that the context leaves.
            top: number of most likely tokens to return.
            raw: whether special tokens are returned as text.
        """
        room = self.most_tokens - len(prompt)
        if limit is not None and limit > room:
            raise EngineRefused(
                f"This model's maximum context length is {self.most_tokens} tokens. You asked for "
                f"{limit} behind a prompt of {len(prompt)}.",
                status=400,
                param="max_tokens",
            )
        bias = {self._id(name): value for name, value in (body.logit_bias or {}).items()}
        enders: dict[int, int | None] = dict.fromkeys(body.stop_token_ids or ())
        enders = {index: index for index in enders}
        if not body.ignore_eos:
            enders |= self.text.enders
        allowed = body.allowed_token_ids
        return Sampling(
            max_tokens=room if limit is None else limit,
            temperature=self._setting(body, "temperature", 1.0),
            top_p=self._setting(body, "top_p", 1.0),
            top_k=max(0, int(self._setting(body, "top_k", 0))),
            min_p=self._setting(body, "min_p", 0.0),
            repetition_penalty=self._setting(body, "repetition_penalty", 1.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            allowed=tuple(self._id(index) for index in allowed) if allowed else None,
            seed=body.seed,
            enders=enders,
            stops=tuple(body.stops()),
            keep_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=not raw and body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
            top_logprobs=top,
            prompt_logprobs=body.prompt_logprobs,
        )

    @asynccontextmanager
    async def running(self, rows: Sequence[Row]) -> AsyncIterator[Callable[[], Any]]:
        """Runs rows inside the block; yields a function that waits until one has progressed."""
        if not self.runner.alive:
            raise EngineRefused("The engine has ended.", status=503)
        news = asyncio.Event()
        for row in rows:
            row.told = news.set
        self.runner.submit(rows)
        try:

            async def wait() -> None:
                await news.wait()
                news.clear()

            yield wait
        finally:
            if any(row.finish is None for row in rows):
                self.runner.abort(rows)

    async def whole(self, rows: Sequence[Row]) -> None:
        """Runs rows until all have ended."""
        async with self.running(rows) as wait:
            while any(row.finish is None for row in rows):
                await wait()
        check(rows)

    def _setting(self, body: Sampled, name: str, plain: float) -> float:
        value = getattr(body, name)
        if value is None:
            value = self._defaults.get(name, plain)
        return float(value)

    def _id(self, name: str | int) -> int:
        try:
            index = int(name)
        except ValueError:
            index = -1
        if not 0 <= index < self.vocabulary:
            raise EngineRefused(f"{name!r} is not an id of the vocabulary.", status=400)
        return index


def check(rows: Sequence[Row]) -> None:
    """Checks that no row failed."""
    for row in rows:
        if row.finish == "error":
            raise EngineRefused(f"The engine failed: {row.error}", status=500)
