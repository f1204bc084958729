"""Calls an external retriever, by the contract of Search-R1 and AFM.

    POST {"queries": ["..."], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id": "...", "contents": "\\"Title\\"\\nText"}, "score": 1.5}]]}

A document may also have `title` and `text`, or be a bare text; one without a score counts 0. Its
errors are infrastructure failures, never the agent's.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import aiohttp
import msgspec
import orjson
from envserver_records.backoff import Backoff

from envserver import InputError, ServiceError

from .bm25 import Hit, Passage


class RetrieverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the retriever.

    Args:
        url: the full address, such as http://localhost:8000/retrieve.
        timeout_seconds: timeout of one try.
        retries: number of retries after temporary errors: no connection, a timeout, a status of 429
        or from 500.
        pause_seconds: pause before the first retry; doubled each time.
        most_at_once: maximum number of requests in flight; more wait.
        most_bytes: maximum size of an answer.
    """

    url: str
    timeout_seconds: float = 20.0
    retries: int = 2
    pause_seconds: float = 0.5
    most_at_once: int = 32
    most_bytes: int = 8 << 20


class HttpRetriever:
    """A client of one retriever; use it with `async with`."""

    def __init__(self, settings: RetrieverSettings) -> None:
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(settings.most_at_once)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_seconds)
        self._http = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """Returns at most `top_k` hits, in the retriever's order.
        Raises ServiceError: it does not answer, or its answer holds no hits.
        """
        body = orjson.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        async with self._places:
            answer = await self._asked(body)
        try:
            return _hits(orjson.loads(answer))[:top_k]
        except (orjson.JSONDecodeError, InputError) as error:
            raise ServiceError(f"The retriever's answer cannot be read: {error}") from error

    async def _asked(self, body: bytes) -> bytes:
        backoff = Backoff(self._settings.pause_seconds)
        for failures in range(1, self._settings.retries + 1):
            try:
                return await self._post(body)
            except _MayPass:
                await asyncio.sleep(backoff.seconds(failures))
        return await self._post(body)

    async def _post(self, body: bytes) -> bytes:
        assert self._http is not None, "async with HttpRetriever(...)"
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(self._settings.url, data=body, headers=headers) as answer:
                content = await answer.content.read(self._settings.most_bytes + 1)
                while not answer.content.at_eof() and len(content) <= self._settings.most_bytes:
                    content += await answer.content.read(self._settings.most_bytes)
        except TimeoutError:
            raise _MayPass("The retriever did not answer in time.") from None
        except aiohttp.InvalidURL as error:
            raise ServiceError(f"The retriever's address is invalid: {error}") from error
        except aiohttp.ClientError as error:
            raise _MayPass(f"The retriever cannot be reached: {error}") from error
        if answer.status != 200:
            kind = _MayPass if answer.status == 429 or answer.status >= 500 else ServiceError
            raise kind(f"The retriever answers with status {answer.status}.")
        if len(content) > self._settings.most_bytes:
            raise ServiceError(f"The retriever's answer is over {self._settings.most_bytes} bytes.")
        return content


class _MayPass(ServiceError):
    """A failure that a retry may cure."""


def _hits(answer: Any) -> list[Hit]:
    result = answer.get("result") if isinstance(answer, dict) else answer
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise InputError('it has no "result" with one list for the one query')
    return [_hit(one) for one in result[0]]


def _hit(one: Any) -> Hit:
    score: Any = 0.0
    if isinstance(one, dict) and "document" in one:
        one, score = one["document"], one.get("score", 0.0)
    try:
        return Hit(Passage.from_data(one), float(score))
    except (TypeError, ValueError) as error:
        raise InputError("a score is not a number") from error
