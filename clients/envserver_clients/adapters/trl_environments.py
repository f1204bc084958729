"""Environments for TRL's `environment_factory`: TRL's loop with our tasks, tools and scores.

    environment = math_environment(data_set="gsm8k", data_path="rows.jsonl")
    trainer = GRPOTrainer(
        model=..., args=..., environment_factory=environment,
        train_dataset=Dataset.from_list(dataset_rows(environment)),
    )

TRL generates and parses the calls, so this works for environments whose tools run in the trainer's
process and whose score depends only on the tool calls. For agents, sandboxes and exact tokens use a
server (`trl_rollouts`). Invariants: each tool has the signature of its JSON schema and
refuses calls that violate it; the model never sees the answer. Written for TRL 1.16.0
(`GRPOTrainer.__init__`, `_generate_and_score_completions`).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from envserver_records import ConfigError, InputError, Result, Split, Task
from envserver_tools.calling import Tool, ToolError, checked_arguments, cut

from envserver import Environment

Tools = Mapping[str, Tool]
_RESERVED: Final = frozenset({"reset", "get_reward"})
_TYPES: Final = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_MOST_TASKS: Final = 100_000


@dataclass(frozen=True)
class ToolUse:
    """A valid call of a tool."""

    tool: str
    arguments: dict[str, Any]
    text: str


class TrlEnvironment:
    """Runs one rollout at a time: what TRL calls an environment. See `trl_environment`."""

    environment: ClassVar[Environment]
    tasks: ClassVar[Mapping[str, Task]]
    # TRL makes a tool of every public function that it finds here.
    _question: ClassVar[Callable[[dict[str, Any]], str]]
    _output: ClassVar[Callable[[list[ToolUse]], Any]]

    def __init__(self) -> None:
        self._task: Task | None = None
        self._uses: list[ToolUse] = []
        self._errors = 0

    def reset(self, *, task_id: str, **columns: Any) -> str:
        """Starts the task of this id; returns the question for the model. Raises InputError: there
        is no such task."""
        if task_id not in self.tasks:
            raise InputError(f"{self.environment.name} has no task {task_id!r}.", place="task_id")
        self._task, self._uses, self._errors = self.tasks[task_id], [], 0
        return type(self)._question(self._task.public)

    def get_reward(self) -> float | None:
        """Returns the environment's reward for the tool calls; None if it cannot score them."""
        if self._task is None:
            return None
        output = type(self)._output(self._uses)
        metrics = {"tool_errors": float(self._errors)}
        turns = len(self._uses) + 1
        result = Result(output=output, turns=turns, metrics=metrics, finish_reason="stop")
        score = self.environment.score(self._task, result)
        if inspect.isawaitable(score):
            score = asyncio.run(_awaited(score))
        return None if score.error is not None else score.reward

    def _use(self, tools: Tools, name: str, arguments: dict[str, Any]) -> str:
        given = {key: value for key, value in arguments.items() if value is not None}
        try:
            tool, valid = checked_arguments(tools, name, given)
            text = tool.function(**valid)
        except ToolError:
            self._errors += 1
            raise
        if not isinstance(text, str):
            raise TypeError(f"{name} is asynchronous; TRL needs plain functions.")
        self._uses.append(ToolUse(name, valid, text))
        return cut(text, tool.max_characters)


def trl_environment(
    environment: Environment,
    tools: Tools,
    *,
    question: Callable[[dict[str, Any]], str],
    output: Callable[[list[ToolUse]], Any],
    split: Split = "train",
    limit: int = _MOST_TASKS,
) -> type[TrlEnvironment]:
    """Returns the factory: a class whose instances TRL creates and reuses.

    `tools`: plain functions; each becomes a method. `question` makes the question for the model
    from a task's public part, `output` the rollout's output, which the environment scores, from the
    tool calls. Raises ConfigError: the environment cannot run in TRL's loop.
    """
    if environment.sandbox is not None:
        raise ConfigError(
            f"{environment.name} needs sandboxes, which TRL's loop does not have.",
            hint="Use EnvserverRollouts with a server.",
        )
    if taken := _RESERVED & tools.keys():
        raise ConfigError(f"A tool cannot be called {min(taken)!r} in TRL.")
    tasks = itertools.islice(environment.tasks(split), limit)
    members: dict[str, Any] = {
        "environment": environment,
        "tasks": {task.id: task for task in tasks},
        "_question": staticmethod(question),
        "_output": staticmethod(output),
        **{name: _method(tools, tool) for name, tool in tools.items()},
    }
    return type(f"{environment.name.capitalize()}TrlEnvironment", (TrlEnvironment,), members)


def dataset_rows(environment: type[TrlEnvironment], prompt: str = "") -> list[dict[str, Any]]:
    """Returns a data set's rows, one for each task, with `prompt` before the question."""
    return [
        {"prompt": [{"role": "user", "content": prompt}], "task_id": task_id}
        for task_id in environment.tasks
    ]


def math_environment(
    split: Split = "train", limit: int = 1000, **settings: Any
) -> type[TrlEnvironment]:
    """Returns `trl_environment` of math problems and a calculator; `settings` as for `--env.*`."""
    from envserver_environments.math.agent import TOOLS
    from envserver_environments.math.env import Math
    from envserver_environments.math.prompts import question

    def output(uses: list[ToolUse]) -> dict[str, Any]:
        answers = (use.text for use in uses if use.tool == "finish")
        return {"answer": next(answers, None), "text": ""}

    environment = Math(Math.Config(**settings))
    return trl_environment(
        environment, TOOLS, question=question, output=output, split=split, limit=limit
    )


def _method(tools: Tools, tool: Tool) -> Callable[..., str]:
    function = tool.description["function"]
    properties: dict[str, Any] = function["parameters"].get("properties", {})
    required = set(function["parameters"].get("required", ()))

    def method(self: TrlEnvironment, **arguments: Any) -> str:
        return self._use(tools, tool.name, arguments)

    types = {name: _type(schema, name in required) for name, schema in properties.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            name,
            kind,
            default=inspect.Parameter.empty if name in required else None,
            annotation=types[name],
        )
        for name in properties
    ]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = _docstring(function.get("description", tool.name), properties)
    method.__annotations__ = {**types, "return": str}
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [self_parameter, *parameters], return_annotation=str
    )
    return method


def _type(schema: Mapping[str, Any], is_required: bool) -> Any:
    kind = _TYPES.get(str(schema.get("type")), str)
    return kind if is_required else kind | None


def _docstring(does: str, properties: Mapping[str, Any]) -> str:
    lines = [
        f"    {name}: {' '.join(str(schema.get('description', name)).split())}"
        for name, schema in properties.items()
    ]
    return "\n".join([" ".join(does.split()), "", "Args:", *lines])


async def _awaited(value: Any) -> Any:
    return await value
