"""Search by the scope of a run: the question's own passages, or a service.

question   in the worker, over the passages in the task
corpus     a service of the server, which holds one index for all agents
external   a service of the server, which calls an external retriever
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from envserver_tools.retrieval import (
    FewPassages,
    Hit,
    HttpRetriever,
    Passage,
    PassageIndex,
    RetrieverSettings,
    passages_from,
)

from envserver import Caller, InputError, PublicTask, Rollout, Service

Scope = Literal["question", "corpus", "external"]
Search = Callable[[str, int], Awaitable[list[Hit]]]
"""Takes a query and the maximum number of hits; returns them, best first."""

SEARCH = "search"
"""Name of the service."""
MAX_QUERY_CHARACTERS = 300
MAX_TOP_K = 10


def search_of(task: PublicTask, run: Rollout, scope: Scope) -> Search:
    """Returns the search function of the agent of `run`."""
    if scope != "question":
        return _asking(run)
    few = FewPassages(passages_from(task.public["passages"]))

    async def search(query: str, top_k: int) -> list[Hit]:
        return few.search(query, top_k)

    return search


@asynccontextmanager
async def corpus_services(
    read_passages: Callable[[], Iterable[Passage]],
) -> AsyncIterator[Mapping[str, Service]]:
    """The services over one corpus, which is read and indexed here, beside the event loop."""
    index = await asyncio.to_thread(lambda: PassageIndex(read_passages()))

    async def search(query: str, top_k: int) -> list[Hit]:
        return await asyncio.to_thread(index.search, query, top_k)

    yield {SEARCH: _service(search)}


@asynccontextmanager
async def external_services(settings: RetrieverSettings) -> AsyncIterator[Mapping[str, Service]]:
    """The services over a retriever elsewhere."""
    async with HttpRetriever(settings) as retriever:
        yield {SEARCH: _service(retriever.search)}


def _service(search: Search) -> Service:
    async def answer(arguments: dict[str, Any], caller: Caller) -> list[dict[str, Any]]:
        query, top_k = arguments.get("query"), arguments.get("top_k")
        if not isinstance(query, str) or len(query) > MAX_QUERY_CHARACTERS:
            raise InputError(
                f"'query' must be a text of at most {MAX_QUERY_CHARACTERS} characters."
            )
        if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
            raise InputError(f"'top_k' must be a number from 1 to {MAX_TOP_K}.")
        return [hit.as_data() for hit in await search(query, top_k)]

    return answer


def _asking(run: Rollout) -> Search:
    async def search(query: str, top_k: int) -> list[Hit]:
        found = await run.call_tool(SEARCH, {"query": query, "top_k": top_k})
        return [Hit(Passage.from_data(one), one["score"]) for one in found]

    return search
