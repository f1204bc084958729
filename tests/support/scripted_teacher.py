"""A small engine over HTTP that writes plans as a script says: some well, some badly.

`kinds_of(10_000)` is what it does with 10,000 queries, of which 8,189 get a usable row. What it
answers depends on the query and on how often it was corrected, on nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from .waiting import PATIENCE

Json = dict[str, Any]

USELESS = {"broken": 500, "cyclic": 300, "wrong tool": 300, "unknown step": 200, "same": 112}
"""Queries of 10,000 whose plans are of no use, but for one of those that get the same plan."""
REPEATED = 400
"""Lines of 10,000 that are a query of another line, in other letters."""
_CORRECTED = ("good", "good", "good", "good", "broken first", "cyclic first", "broken twice")
_QUERY = re.compile(r"query (\d+)", re.IGNORECASE)


def kinds_of(lines: int) -> list[str]:
    """Returns what happens to each query of a file of `lines` lines, without the repeated ones."""
    kinds = [kind for kind, count in USELESS.items() for _ in range(count * lines // 10_000)]
    wanted = lines - REPEATED * lines // 10_000
    kinds += [_CORRECTED[n % len(_CORRECTED)] for n in range(wanted - len(kinds))]
    random.Random(26).shuffle(kinds)
    return kinds


def query_lines(kinds: list[str], lines: int) -> list[str]:
    """Returns the lines of a file of queries."""
    texts = [f"What does query {number} ask?" for number in range(len(kinds))]
    texts += [f"  {texts[7 * n].upper()} " for n in range(lines - len(texts))]
    return [json.dumps({"query": text}) for text in texts]


def plan(number: int, *, is_graph: bool) -> Json:
    """Returns a valid plan for a query."""
    agents = [("math",), ("search", "math"), ("search", "code", "math"), ("code",)][number % 4]
    if not is_graph:
        calls = {"math": "/math(do {})", "code": "/code(write {})"}
        search = '/general-search(query="find {}", mode=web)'
        route = [calls.get(agent, search).format(number) for agent in agents]
        texts = ("expected_artifacts", "thinking_outline", "todo_list", "tags")
        return {
            "route_plan": route,
            "route_rationale": f"Query {number} needs it.",
            **{key: [f"- {key} of {number}"] for key in (*texts, "acceptance_criteria")},
            "handoff_plan": " -> ".join(route),
            "difficulty": ("introductory", "intermediate", "advanced")[number % 3],
            "metrics": {"primary": ["right"]},
        }
    tools = {"math": ("solve", "problem"), "code": ("write", "task"), "search": ("query", "q")}
    steps: list[Json] = []
    for place, agent in enumerate(agents):
        tool, argument = tools[agent]
        # Of three steps the last needs both others, which stand side by side.
        before = [step["id"] for step in steps] if place == len(agents) - 1 else []
        args = {argument: f"part {place} of {number}"}
        steps.append({"id": f"s{place}", "agent": agent, "tool": tool, "args": args,
                      "depends_on": before})  # fmt: skip
    return _graph(steps, f"Query {number} needs it.")


def _graph(steps: list[Json], rationale: str) -> Json:
    handoffs = [{"from": name, "to": step["id"], "payload": "the result"}
                for step in steps for name in step["depends_on"]]  # fmt: skip
    return {"rationale": rationale, "steps": steps, "handoffs": handoffs,
            "final_step": steps[-1]["id"]}  # fmt: skip


def _spoiled(kind: str, whole: Json) -> Json:
    """Returns a plan with the fault of its kind."""
    if "route_plan" in whole:
        calls = {"wrong tool": ["/browser(open it)"], "unknown step": []}
        return {**whole, "route_plan": calls.get(kind, ["/math(a)", "/math(b)"])}
    first = {**whole["steps"][0]}
    if kind == "wrong tool":
        first["tool"] = "browse"
    else:
        first["depends_on"] = ["s9" if kind == "unknown step" else whole["final_step"]]
    return _graph([first, *whole["steps"][1:]], whole["rationale"])


def answer(kind: str, number: int, corrected: int, *, is_graph: bool) -> str:
    """Returns the text of an answer, after `corrected` corrections."""
    whole = plan(1 if kind == "same" else number, is_graph=is_graph)
    if kind == "same":
        whole["rationale" if is_graph else "route_rationale"] = "It is always so."
    fault, _, how_often = (
        kind.partition(" ") if kind.endswith(("first", "twice")) else (kind, "", "")
    )
    if corrected < {"first": 1, "twice": 2, "": 9}[how_often] and kind not in ("good", "same"):
        if fault == "broken":
            return f"Here it is:\n{json.dumps(whole)[:-1]}"
        whole = _spoiled(fault, whole)
    thoughts = f"<think>{number} is a number.</think>\n" if number % 5 == 0 else ""
    return thoughts + json.dumps(whole)


class Teacher:
    """The engine. `asked` counts the queries that were sent to it the first time round.

    Args:
        busy_every: each so many requests is refused with 429, and a Retry-After of 0 seconds.
        key: the only key that it takes; "": any.
    """

    def __init__(self, kinds: list[str], *, busy_every: int = 0, key: str = "") -> None:
        self.kinds = kinds
        self.asked: Counter[int] = Counter()
        self.requests = self.refused = 0
        self.models: Counter[str] = Counter()
        self.url = ""
        self._busy_every = busy_every
        self._key = key

    def application(self) -> web.Application:
        """Returns the HTTP application."""
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "teacher", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "Incorrect API key."}}, status=401)
        self.requests += 1
        if self._busy_every and self.requests % self._busy_every == 0:
            self.refused += 1
            error = {"error": {"message": "Rate limit reached."}}
            return web.json_response(error, status=429, headers={"retry-after": "0"})
        body = await request.json()
        messages = body["messages"]
        asked = next((m["content"] for m in messages if m["role"] == "user"), "")
        found = _QUERY.search(asked)
        corrected = sum(m["role"] == "assistant" for m in messages)
        if found is None:  # a probe of the engine
            text = "yes"
        else:
            number = int(found[1])
            self.asked[number] += not corrected
            self.models[body["model"]] += 1
            is_graph = "depends_on" in messages[0]["content"]
            text = answer(self.kinds[number], number, corrected, is_graph=is_graph)
        return web.json_response(
            {
                "id": f"chat-{self.requests}",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 700, "completion_tokens": 100, "total_tokens": 800},
            }
        )


@contextlib.contextmanager
def serving(teacher: Teacher) -> Iterator[Teacher]:
    """Serves it on a port of this machine, in a thread; its `url` is set."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(teacher.application(), access_log=None)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        teacher.url = f"http://127.0.0.1:{port}/v1"

    asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield teacher
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
