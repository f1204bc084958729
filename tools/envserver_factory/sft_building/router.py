"""The router's data set: a query and its plan of ten keys become a prompt and a completion.

In: a row of Alovestocode/Router-agent-data or of `sft router generate`, with a plan of ten keys or
one that is a graph (`steps`). Out: an `Example` whose completion is the plan as JSON on one line,
keys in order, after its outline in <think> where requested; or why the row is dropped. `RouterRow`
and `GraphPlan` are the schemas; the environment `router` judges answers more strictly (`--verify`
applies it to rows, too).
"""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .examples import Example

Json = dict[str, Any]
Think = Literal["none", "outline"]
Call = Annotated[str, Field(pattern=r"(?s)^/(math|code|general-search)\(.*\)$")]


class RouterRow(BaseModel):
    """The plan in a row. Nothing is converted to fit; other keys are allowed."""

    model_config = ConfigDict(strict=True)

    route_plan: list[Call] = Field(min_length=1)
    route_rationale: str = Field(min_length=1)
    expected_artifacts: list[str]
    thinking_outline: list[str]
    handoff_plan: str
    todo_list: list[str]
    difficulty: Literal["introductory", "intermediate", "advanced"]
    tags: list[str]
    acceptance_criteria: list[str]
    metrics: dict[str, Any]


KEYS: tuple[str, ...] = tuple(RouterRow.model_fields)

PROMPT = f"""You are the router of a team of three specialists: math, code and general search.
Plan how the team answers the user's query. Reply with one JSON object and nothing else.

- Its keys: {", ".join(KEYS)}.
- route_plan lists the calls in their order: /math(...), /code(...), /general-search(...).
- Keep the user's own wording wherever you can.

User query:
"""


class GraphStep(BaseModel):
    """One step of a plan that is a graph."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    agent: Literal["math", "code", "search"]
    tool: str
    args: dict[str, Any]
    depends_on: list[str]


class GraphPlan(BaseModel):
    """A plan of the environment's profile `graph`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rationale: str = Field(min_length=1)
    steps: list[GraphStep] = Field(min_length=1)
    handoffs: list[dict[str, str]]
    final_step: str


GRAPH_PROMPT = f"""You are the router of a team of three specialists: math, code and search.
Plan how the team answers the user's query. Reply with one JSON object and nothing else.

- Its keys: {", ".join(GraphPlan.model_fields)}.
- Each of steps has {", ".join(GraphStep.model_fields)}. The agents' tools and their args: math:
  solve (problem), calculate (expression); code: write (task), run_tests (target); search:
  query (q).
- depends_on names the steps whose results a step needs; for each of them handoffs has one object
  with from, to and payload. All steps lead to final_step, whose result is the answer.

User query:
"""


def example_of(row: Json, *, think: Think = "none") -> Example | str:
    """Returns the example of `row`, or why it is dropped: a short text, equal for equal faults."""
    query = row.get("user_query", row.get("query"))
    if not isinstance(query, str) or not query.strip():
        return "no query"
    is_graph = isinstance(row.get("plan"), dict) and "steps" in row["plan"]
    plan: Json = row["plan"] if is_graph else row
    try:
        (GraphPlan if is_graph else RouterRow).model_validate(plan)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = first["loc"][0]
        return f"no {key}" if first["type"] == "missing" else f"{key} is wrong"
    keys = GraphPlan.model_fields if is_graph else KEYS
    completion = json.dumps({key: plan[key] for key in keys}, ensure_ascii=False)
    if think == "outline":
        outline = plan["rationale"] if is_graph else "\n".join(row["thinking_outline"])
        completion = f"<think>\n{outline}\n</think>\n{completion}"
    route = route_of(plan)
    if route is None:
        return "steps are no graph without a cycle"
    facts = {"tools": tools_of(plan), "plan_shapes": [route]}
    return Example((GRAPH_PROMPT if is_graph else PROMPT) + query.strip(), completion, row, facts)


def tools_of(plan: Json) -> list[str]:
    """Returns the specialists that a plan calls, in its order."""
    if "steps" in plan:
        return [step["agent"] for step in plan["steps"]]
    return [_tool(call) for call in plan["route_plan"]]


def route_of(plan: Json) -> str | None:
    """Returns the shape of a plan: `search->math`, `code+search->math` where steps are side by
    side; None if steps wait for each other."""
    if "steps" not in plan:
        return "->".join(tools_of(plan))
    agents = {step["id"]: step["agent"] for step in plan["steps"]}
    order = TopologicalSorter({step["id"]: step["depends_on"] for step in plan["steps"]})
    try:
        order.prepare()
    except CycleError:
        return None
    stages: list[str] = []
    while order.is_active():
        ready = order.get_ready()
        stages.append("+".join(sorted(agents.get(name, "?") for name in ready)))
        order.done(*ready)
    return "->".join(stages)


def _tool(call: str) -> str:
    found = re.match(r"/([a-z-]+)", call)
    return found[1] if found else call
