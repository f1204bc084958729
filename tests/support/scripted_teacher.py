"""A small engine over HTTP that writes plans as a script says: some well, some badly.

`kinds_of(10_000)` is what it does with 10,000 queries, of which 8,189 get a usable row. What it
answers depends on the query and on how often it was corrected, on nothing else.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from support.engine_stand_in import FakeVllm, in_thread

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


class Teacher(FakeVllm):
    """The engine. `asked` counts the queries that were sent to it the first time round.

    Args:
        busy_every: each so many requests is refused with 429, and a Retry-After of 0 seconds.
    """

    def __init__(self, kinds: list[str], *, busy_every: int = 0) -> None:
        can = frozenset({"top", "tools"})
        super().__init__(self._says, can=can, cards=[{"id": "teacher"}], retry_after="0")
        self.kinds = kinds
        self.asked: Counter[int] = Counter()
        self.models: Counter[str] = Counter()
        self.refused = 0
        self._busy_every = busy_every

    def fault(self) -> int | None:
        if self._busy_every and len(self.requests) % self._busy_every == 0:
            self.refused += 1
            return 429
        return None

    def _says(self, body: Json) -> str:
        messages = body["messages"]
        asked = next((m["content"] for m in messages if m["role"] == "user"), "")
        found = _QUERY.search(asked)
        if found is None:  # a probe of the engine
            return "yes"
        number = int(found[1])
        corrected = sum(m["role"] == "assistant" for m in messages)
        self.asked[number] += not corrected
        self.models[body["model"]] += 1
        is_graph = "depends_on" in messages[0]["content"]
        return answer(self.kinds[number], number, corrected, is_graph=is_graph)

    def usage(self, prompt: list[int], choices: list[Json]) -> Json:
        return {"prompt_tokens": 700, "completion_tokens": 100, "total_tokens": 800}


@contextlib.contextmanager
def serving(teacher: Teacher) -> Iterator[Teacher]:
    """Serves it on a port of this machine, in a thread; its `url` is set."""
    with in_thread(teacher):
        teacher.url += "/v1"
        yield teacher
