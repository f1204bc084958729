"""The router's data set: a query and its plan of ten keys become a prompt and a completion.

In: a row of Alovestocode/Router-agent-data. Out: an `Example` whose completion is the plan as JSON
on one line, keys in order, after its outline in <think> where requested; or why the row is dropped.
`RouterRow` is the schema of this data set; the environment `router` judges answers more strictly
(`--verify` applies it to rows, too).
"""

from __future__ import annotations

import json
import re
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


def example_of(row: Json, *, think: Think = "none") -> Example | str:
    """Returns the example of `row`, or why it is dropped: a short text, equal for equal faults."""
    query = row.get("user_query", row.get("query"))
    if not isinstance(query, str) or not query.strip():
        return "no query"
    try:
        RouterRow.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = first["loc"][0]
        return f"no {key}" if first["type"] == "missing" else f"{key} is wrong"
    completion = json.dumps({key: row[key] for key in KEYS}, ensure_ascii=False)
    if think == "outline":
        outline = "\n".join(row["thinking_outline"])
        completion = f"<think>\n{outline}\n</think>\n{completion}"
    tools = [_tool(call) for call in row["route_plan"]]
    facts = {"tools": tools, "plan_shapes": ["->".join(tools)]}
    return Example(PROMPT + query.strip(), completion, row, facts)


def _tool(call: str) -> str:
    found = re.match(r"/([a-z-]+)", call)
    return found[1] if found else call
