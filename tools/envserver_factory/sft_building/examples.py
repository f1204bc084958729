"""Reads the rows of a data set, and turns each into a training example or a reason to drop it.

Whether an answer is right is judged by the environment of the same name (`prepare`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from envserver_records.errors import ConfigError, InputError
from envserver_records.extras import install_command
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envserver.rows.sources import Source, streamed

Json = dict[str, Any]
Message = dict[str, str]
Form = Literal["messages", "prompt"]


@dataclass(frozen=True)
class Example:
    """`row`: for the environment that verifies it; `facts`: names to count, by histogram."""

    prompt: str | list[Message]
    completion: str
    row: Json
    facts: dict[str, list[str]]

    def as_row(self, form: Form, template: Template | None = None) -> Json:
        if form == "messages":
            return {"messages": self._messages()}
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, "completion": self.completion}
        if template is None:
            said = [{"role": "assistant", "content": self.completion}]
            return {"prompt": self.prompt, "completion": said}
        before, whole = template(self.prompt, self.completion)
        return {"prompt": before, "completion": whole.removeprefix(before)}

    def _messages(self) -> list[Message]:
        asked = self.prompt
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        return [*asked, {"role": "assistant", "content": self.completion}]


Template = Callable[[list[Message], str], tuple[str, str]]


def template_of(tokenizer: str) -> Template:
    """Loads a chat template: renders a conversation before and with its completion."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"A tokenizer's chat template needs transformers, which cannot be imported: {error}.",
            hint=f"{install_command('local')}, or leave --tokenizer out: "
            "the template is then applied when the model is trained.",
        ) from error
    if "/" not in tokenizer and not Path(tokenizer).is_dir():
        raise ConfigError(
            f"There is no folder {tokenizer!r}.", hint="A name on the hub is OWNER/NAME."
        )
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"There is no tokenizer {tokenizer!r}: {str(error)[:300]}") from error
    if not getattr(loaded, "chat_template", None):
        raise ConfigError(f"The tokenizer {tokenizer!r} has no chat template.")

    def render(asked: list[Message], said: str) -> tuple[str, str]:
        before = loaded.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        answered = [*asked, {"role": "assistant", "content": said}]
        whole = loaded.apply_chat_template(answered, tokenize=False)
        if not whole.startswith(before):
            raise ConfigError(
                f"The chat template of {tokenizer!r} shows a conversation otherwise once it is "
                "answered.",
                hint="Leave --tokenizer out: `envserver_clients.sft` templates turn by turn.",
            )
        return before, whole

    return render


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


def rows_of(
    source: str, *, limit: int | None = None, split: str = "train"
) -> Iterator[Json | None]:
    """Yields the rows of `source` in order, None for a line that is not one; streams the hub."""
    is_hub = _HUB_NAME.fullmatch(source) and not Path(source).exists()
    name, _, config = source.partition(":")
    rows = streamed(name, config or None, split) if is_hub else _rows(source, split)
    return itertools.islice(rows, limit)


def _rows(source: str, split: str) -> Iterator[Json | None]:
    rows = Source(source).open(split)
    for number in range(rows.count):
        try:
            yield rows.read(number)
        except InputError:
            yield None


MATH_SYSTEM = (
    "You are an expert mathematics tutor. Work through each problem one step at a time, make your "
    "reasoning clear, and put the final answer in \\boxed{}."
)
_PROBLEM = ("question", "problem", "prompt")
_SOLUTION = ("generated_solution", "solution", "output", "response")


def math_example(row: Json) -> Example | str:
    """Returns a problem with its worked solution (XenArcAI/MathX-5M), or why it is dropped."""
    problem, solution = _text(row, _PROBLEM), _text(row, _SOLUTION)
    if problem is None:
        return "no problem"
    if solution is None:
        return "no solution"
    asked = [{"role": "system", "content": MATH_SYSTEM}, {"role": "user", "content": problem}]
    return Example(asked, solution, row, {})


def _text(row: Json, names: tuple[str, ...]) -> str | None:
    found = (row.get(name) for name in names)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), None)


CODE_SYSTEM = "You are an expert programming assistant."
MAX_INSTRUCTION_CHARACTERS = 4000


def code_example(row: Json) -> Example | str:
    """Returns a program for an instruction (OpenCoder-LLM/opc-sft-stage2), or why it is dropped."""
    instruction, output = row.get("instruction"), row.get("output")
    if not isinstance(instruction, str) or not instruction.strip():
        return "no instruction"
    if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
        return "instruction too long"
    if not isinstance(output, str) or not output.strip():
        return "no output"
    asked = [{"role": "system", "content": CODE_SYSTEM}, {"role": "user", "content": instruction}]
    return Example(asked, output, row, {})


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
    if "steps" in plan:
        return [step["agent"] for step in plan["steps"]]
    return [_tool(call) for call in plan["route_plan"]]


def route_of(plan: Json) -> str | None:
    """Returns the shape of a plan, `code+search->math`; None if steps wait for each other."""
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
