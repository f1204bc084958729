"""The base of all agents' runs, and the baseline agent."""

from __future__ import annotations

import abc
import asyncio
import importlib.util
import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import (
    Tool,
    ToolError,
    ToolResult,
    call_tool,
    function_tool,
    run_tool_call,
    toolbox,
    visible_text,
)

from envserver import ConfigError, LimitReached, Message, Rollout

from ..interpreter.inside import ANSWER, answer_text
from ..interpreter.process import Interpreter, Outcome, observation, shortened
from .endpoint import CutOff, Endpoint, Turn
from .prompts import TOOL_FAILED, system_prompt

THOUGHT_CHARACTERS = 4000
CODE_CHARACTERS = 8000
OBSERVATION_CHARACTERS = 4000


class Trace:
    """The steps of a run: kept here, and sent to the server at once."""

    def __init__(self, run: Rollout) -> None:
        self.steps: list[Json] = []
        self._run = run

    def add(self, step: Json) -> None:
        self.steps.append(step)
        thought = step["thought"]
        match step["action"]:
            case None | []:
                self._run.log_action("plan" if step["step"] == 0 else "say", {}, thought)
                return
            case str() as code:
                tool, given = "python", {"code": code}
            case [call]:
                tool, given = str(call["name"]).strip() or "call", call["arguments"]
            case calls:
                tool, given = "several", {"calls": calls}
        if thought:
            self._run.log_action("reason", {}, thought)
        error = step["error"]
        failed = "" if error is None else f"{error['kind']}: {error['message']}"
        self._run.log_action(tool, given, step["observation"], error=failed)


def step_data(
    number: int,
    *,
    thought: str,
    action: str | list[Json] | None,
    observation: str,
    error: tuple[str, str] | None,
    tokens: tuple[int, int],
    seconds: float,
    final: bool = False,
) -> Json:
    """Returns one step as data.

    Args:
        action: code, or tool calls as name and arguments.
        error: its kind (parsing, execution, timeout, died, tool) and its first words.
        tokens: of the prompt and of the turn.
    """
    return {
        "step": number,
        "thought": shortened(thought.strip(), THOUGHT_CHARACTERS),
        "action": shortened(action, CODE_CHARACTERS) if isinstance(action, str) else action,
        "observation": shortened(observation, OBSERVATION_CHARACTERS),
        "error": None if error is None else {"kind": error[0], "message": error[1][-500:]},
        "tokens": {"prompt": tokens[0], "completion": tokens[1]},
        "seconds": round(seconds, 3),
        "final": final,
    }


def call_data(call: Json) -> Json:
    """A tool call in OpenAI's shape as its name and arguments."""
    arguments = call["function"]["arguments"]
    try:
        arguments = json.loads(arguments)
    except (TypeError, ValueError):
        arguments = str(arguments)
    return {"name": call["function"]["name"], "arguments": arguments}


PYTHON = "python"
_ERROR_CHARACTERS = 3500

_FINAL_ANSWER = function_tool(
    ANSWER,
    "Gives the final answer and ends the task. Call it alone.",
    {"answer": {"type": ["string", "number", "array"]}},
    ["answer"],
)
_PYTHON = function_tool(
    PYTHON,
    "Executes Python code and gives what it printed, the value of its last expression, or "
    "its error. Variables and files stay for the next call.",
    {"code": {"type": "string"}},
    ["code"],
)

final_answer = Tool(_FINAL_ANSWER, lambda answer: answer_text(answer))


class Tools:
    """The tools that an agent calls natively; asynchronous ones run in `loop` while its thread
    waits."""

    def __init__(
        self,
        given: Iterable[Tool],
        interpreter: Interpreter,
        characters: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._interpreter = interpreter
        self._characters = characters
        self._loop = loop
        python = Tool(_PYTHON, self._python, max_characters=2 * characters)
        self.tools = toolbox(*given, python, final_answer)
        self.outcome: Outcome | None = None

    @property
    def descriptions(self) -> list[Json]:
        return [tool.description for tool in self.tools.values()]

    def run(self, call: Json) -> ToolResult:
        """The result of one call in OpenAI's shape; not from the loop's own thread."""
        return run_from_thread(self.tools, call, self._loop)

    def _python(self, code: str) -> str:
        outcome = self.outcome = self._interpreter.run(code)
        if outcome.answer is not None:
            raise ToolError("final_answer is a tool of its own: call it, not in code.")
        text = observation(outcome, self._characters)
        if outcome.trouble is not None:
            raise ToolError(shortened(text, _ERROR_CHARACTERS))
        return f"It printed:\n{text}" if text.startswith(TOOL_FAILED) else text


def as_function(tool: Tool, loop: asyncio.AbstractEventLoop) -> Callable[..., str]:
    """`tool` for the model's code; it raises ToolError where the call is not in order."""
    names = list(tool.description["function"]["parameters"]["properties"])

    def function(*values: Any, **named: Any) -> str:
        arguments = {**dict(zip(names, values, strict=False)), **named}
        given = {name: value for name, value in arguments.items() if value is not None}
        call = {"function": {"name": tool.name, "arguments": json.dumps(given)}}
        result = run_from_thread(toolbox(tool), call, loop)
        if not result.ok:
            raise ToolError(result.text.removeprefix("Error: "))
        return result.text

    return function


def run_from_thread(
    tools: dict[str, Tool], call: Json, loop: asyncio.AbstractEventLoop
) -> ToolResult:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    tool = tools.get(name) if isinstance(name, str) else None
    if tool is not None and inspect.iscoroutinefunction(tool.function):
        return asyncio.run_coroutine_threadsafe(call_tool(tools, call), loop).result()
    return run_tool_call(tools, call)


Kind = Literal["code", "tools", "plain"]
Prompts = Literal["own", "smolagents"]
Ending = Literal[
    "answered", "max_steps", "turns", "tokens", "time", "context", "cut_off", "no_answer"
]
"""How a run ended. turns, tokens, time, context: a limit; cut_off: a turn of the model was too
long; no_answer: the plain agent wrote neither a call nor an answer."""
_LIMITS: tuple[Ending, ...] = ("turns", "tokens", "time", "context")


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent."""

    agent: Kind = "code"  # code, tools: smolagents' CodeAgent, ToolCallingAgent; plain: a loop
    max_steps: int = 12  # answers without plans; there is no extra call at the end
    planning_interval: int | None = None  # steps between plans; the first is before any step
    extra_imports: tuple[str, ...] = ()  # imported before the first step, named to the model
    token_budget: int | None = None  # sampled tokens in all
    seconds: float | None = None  # of the whole run; the rollout's own deadline applies, too
    step_seconds: float = 60.0  # of one step's code, without the time in tools
    observation_characters: int = 10_000  # the middle of a longer output is left out
    verbosity: int = -1  # smolagents' own log: -1 nothing, 0 errors, 1 steps, 2 all
    prompts: Prompts = "own"  # own: this package's; smolagents: the installed smolagents' templates

    def check(self) -> None:
        for name in self.extra_imports:
            if not _is_installed(name):
                raise ConfigError(f"extra_imports: there is no module {name!r} here.")


@dataclass(frozen=True)
class Solved:
    answer: str | None
    state: Ending
    steps: list[Json]

    def as_output(self) -> Json:
        return {"answer": self.answer, "state": self.state, "steps": self.steps}


def ending_of(error: LimitReached | CutOff) -> Ending:
    if isinstance(error, CutOff):
        return "cut_off"
    return next((known for known in _LIMITS if known == error.detail.get("limit")), "turns")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


_SAID = re.compile(r"FINAL ANSWER:\s*(.+)")


class AgentRun(abc.ABC):
    """One run. Call `run` in a thread, `stop` from another; it ends by itself at `stop_at`
    (`time.time()`). Asynchronous tools run in `loop`; `extra`: additional fields of each
    request."""

    def __init__(
        self,
        run: Rollout,
        rules: AgentOptions,
        tools: Sequence[Tool],
        *,
        loop: asyncio.AbstractEventLoop,
        stop_at: float,
        extra: Json | None = None,
    ) -> None:
        self._rules, self._added, self._loop = rules, tools, loop
        self._trace = Trace(run)
        is_code = rules.agent == "code"
        self._interpreter = Interpreter(
            {tool.name: as_function(tool, loop) for tool in tools} if is_code else None,
            imports=rules.extra_imports,
            step_seconds=rules.step_seconds,
            stop_at=stop_at,
            characters=rules.observation_characters,
        )
        self._tools = Tools(tools, self._interpreter, rules.observation_characters, loop)
        self._endpoint = Endpoint(
            run,
            stop=("</code>",) if is_code else (),
            tools=None if is_code else self._tools.descriptions,
            token_budget=rules.token_budget,
            stop_at=stop_at,
            extra=extra,
        )

    def run(self, question: str) -> Solved:
        """Runs to the end, whatever it is. Raises EngineError, and errors of this package."""
        try:
            answer, state = self._drive(question)
        except (LimitReached, CutOff) as error:
            answer, state = None, ending_of(error)
        finally:
            self._endpoint.close()
            self._interpreter.finish()
        return Solved(answer, state, self._trace.steps)

    def stop(self) -> None:
        self._endpoint.close()
        self._interpreter.close()

    @abc.abstractmethod
    def _drive(self, question: str) -> tuple[str | None, Ending]:
        """Returns the answer, and how the run ended."""


class PlainRun(AgentRun):
    """One run of the agent `plain`: a loop over native tool calls, without smolagents."""

    def _drive(self, question: str) -> tuple[str | None, Ending]:
        prompt = system_prompt("plain", self._added, self._rules.extra_imports)
        messages: list[Message] = [
            {"role": "system", "content": prompt},
            {"role": "user", "content": question},
        ]
        for number in range(1, self._rules.max_steps + 1):
            began = time.time()
            turn = self._endpoint.turn(messages)
            messages.append(turn.message)
            results = [self._tools.run(call) for call in turn.calls]
            answer = _answer(turn, results)
            self._trace.add(_data(number, turn, results, began, answer is not None))
            if answer is not None:
                return answer, "answered"
            if not turn.calls:
                return None, "no_answer"
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result.text}
                for call, result in zip(turn.calls, results, strict=True)
            ]
        return None, "max_steps"


def _answer(turn: Turn, results: list[ToolResult]) -> str | None:
    """Returns the answer of a single valid final_answer call, or of a text without calls."""
    match turn.calls:
        case []:
            said = _SAID.search(visible_text(turn.message.get("content") or "") or "")
            return said[1].strip() if said else None
        case [call] if call["function"]["name"] == ANSWER and results[0].ok:
            return results[0].text
    return None


def _data(number: int, turn: Turn, results: list[ToolResult], began: float, final: bool) -> Json:
    failed = next((result.text for result in results if not result.ok), None)
    return step_data(
        number,
        thought=turn.message.get("content") or "",
        action=[call_data(call) for call in turn.calls],
        observation="\n".join(result.text for result in results),
        error=None if failed is None else ("tool", failed),
        tokens=turn.tokens,
        seconds=time.time() - began,
        final=final,
    )
