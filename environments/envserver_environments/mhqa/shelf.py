"""The passages that one rollout has found, and the tools over them. They are called p1, p2 ... in
the order of first sight, which says nothing about which matter. Sentences are numbered from 0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import MAX_RESULT_CHARACTERS, Tool, ToolError, function_tool, toolbox
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

# question   in the worker, over the passages in the task
# corpus     a service of the server, which holds one index for all agents
# external   a service of the server, which calls an external retriever
Scope = Literal["question", "corpus", "external"]
Search = Callable[[str, int], Awaitable[list[Hit]]]
"""Takes a query and the maximum number of hits; returns them, best first."""

SEARCH = "search"
_TOOLS = json.loads(Path(__file__).with_name("tools.json").read_text(encoding="utf-8"))
MAX_QUERY_CHARACTERS: int = _TOOLS["search"]["properties"]["query"]["maxLength"]
MAX_TOP_K: int = _TOOLS["search"]["properties"]["top_k"]["maximum"]


def search_of(task: PublicTask, run: Rollout, scope: Scope) -> Search:
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
    index = await asyncio.to_thread(lambda: PassageIndex(read_passages()))

    async def search(query: str, top_k: int) -> list[Hit]:
        return await asyncio.to_thread(index.search, query, top_k)

    yield {SEARCH: _service(search)}


@asynccontextmanager
async def external_services(settings: RetrieverSettings) -> AsyncIterator[Mapping[str, Service]]:
    async with HttpRetriever(settings) as retriever:
        yield {SEARCH: _service(retriever.search)}


def _service(search: Search) -> Service:
    async def answer(arguments: Json, caller: Caller) -> list[Json]:
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
        return [Hit(Passage.from_data(hit), hit["score"]) for hit in found]

    return search


MAX_HIT_CHARACTERS = 700
"""Maximum length of one passage in a list of hits; `read` shows all of it."""
MAX_FINISH_CHARACTERS: int = _TOOLS["finish"]["properties"]["answer"]["maxLength"]

NOTHING_FOUND = "Nothing was found: no passage shares a word with the query."


class Shelf:
    """The tools of one rollout, and its final answer. `evidence`: `finish` accepts triples."""

    def __init__(
        self, search: Search, run: Rollout, *, top_k: int, max_searches: int, evidence: bool = False
    ) -> None:
        self._search = search
        self._run = run
        self._top_k = top_k
        self._searches_left = max_searches
        self._max_searches = max_searches
        self._seen: dict[str, Passage] = {}
        self.finished: Json | None = None
        self.look = toolbox(
            Tool(_declared("search"), self.search), Tool(_declared("read"), self._read)
        )
        finish = _declared("finish", *([] if evidence else ["evidence"]))
        self.tools = self.look | toolbox(Tool(finish, self._finish))

    async def search(self, query: str, top_k: int | None = None) -> str:
        if not self._searches_left:
            raise ToolError(
                f"all {self._max_searches} searches are used up: answer from what was found."
            )
        self._searches_left -= 1
        wanted = self._top_k if top_k is None else top_k
        hits = await self._search(query, wanted)
        self._run.log_metric("searches", self._max_searches - self._searches_left)
        share = min(MAX_HIT_CHARACTERS, MAX_RESULT_CHARACTERS // max(1, len(hits)) - 10)
        shown = [self._shown(hit.passage, share) for hit in hits]
        text = "\n\n".join(shown) if shown else NOTHING_FOUND
        self._run.log_action("retrieve", {"query": query, "top_k": wanted}, text)
        return text

    def facts(self, given: Any) -> list[list[Any]]:
        return [
            [passage.title if (passage := self._meant(name)) else name, number]
            for name, number in given or []
        ]

    def keys(self, given: Any) -> list[str]:
        meant = [self._meant(name) for name, _ in given or []]
        return list(dict.fromkeys(passage.key for passage in meant if passage))

    def _read(self, pid: str) -> str:
        passage = self._seen.get(pid)
        if passage is None:
            known = ", ".join(self._seen) or "none yet"
            raise ToolError(f"no search has found a passage {pid[:40]!r}; found: {known}.")
        text = self._shown(passage, MAX_RESULT_CHARACTERS)
        self._run.log_action("retrieve", {"pid": pid}, text)
        return text

    def _finish(self, **arguments: Any) -> str:
        self.finished = arguments
        return "The answer is handed in."

    def _meant(self, name: str) -> Passage | None:
        """The passage with that id, else the first that was seen with that title."""
        if name in self._seen:
            return self._seen[name]
        return next((passage for passage in self._seen.values() if passage.title == name), None)

    def _shown(self, passage: Passage, most: int) -> str:
        pid = self._pid(passage)
        head = f"[{pid}] {passage.title}"
        lines, room = [head], most - len(head)
        for number, sentence in enumerate(passage.sentences):
            line = f"{number}: {sentence}"
            if len(line) >= room:
                lines += [line[: max(0, room)], f"... (read {pid} shows more)"]
                break
            lines.append(line)
            room -= len(line) + 1
        return "\n".join(lines)

    def _pid(self, passage: Passage) -> str:
        for pid, known in self._seen.items():
            if known.key == passage.key:
                return pid
        pid = f"p{len(self._seen) + 1}"
        self._seen[pid] = passage
        return pid


def _declared(name: str, *without: str) -> Json:
    """The declaration of a tool in `tools.json`, `without` some of its arguments."""
    held = _TOOLS[name]
    properties = {key: kind for key, kind in held["properties"].items() if key not in without}
    return function_tool(name, held["description"], properties, held["required"])


FINISH = Tool(_declared("finish"), lambda **arguments: "")
"""`finish` as a message may call it, for who only reads the call."""
