"""A run of one of smolagents' agents: driven step by step, stoppable, returned as data."""

from __future__ import annotations

import time
from typing import Any

from envserver_tools.smolagents_adapter import as_smolagents
from smolagents.agents import ActionOutput
from smolagents.memory import ActionStep, PlanningStep
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.utils import AgentGenerationError, AgentParsingError

from ..interpreter.inside import ANSWER
from .model import ProxyModel
from .plain import AgentRun
from .prompts import instructions, system_prompt
from .rules import Ending
from .smol import CodeAgent, ProcessExecutor, ToolCallingAgent
from .tool_use import PYTHON
from .trace import call_data, step_data


class SmolRun(AgentRun):
    """One run of the agents `code` and `tools`."""

    _agent: CodeAgent | ToolCallingAgent

    def _made(self) -> CodeAgent | ToolCallingAgent:
        rules, tools = self._rules, self._added
        options: dict[str, Any] = {
            "planning_interval": rules.planning_interval,
            "logger": _QUIET if rules.verbosity < 0 else AgentLogger(LogLevel(rules.verbosity)),
        }
        model = ProxyModel(self._endpoint)
        prompt: str | None = None
        named: list[Any] = []
        if rules.prompts == "own":
            prompt = system_prompt(rules.agent, tools, rules.extra_imports)
        else:
            is_code = rules.agent == "code"
            shown = tools if is_code else self._tools.tools.values()
            named = [as_smolagents(tool, self._loop) for tool in shown if tool.name != ANSWER]
            options["instructions"] = instructions(tools, rules.extra_imports)
        if rules.agent == "tools":
            return ToolCallingAgent(named, model, self._tools, prompt, **options)
        executor = ProcessExecutor(self._interpreter)
        return CodeAgent(named, model, executor, prompt, rules.observation_characters, **options)

    def _drive(self, question: str) -> tuple[str | None, Ending]:
        self._agent = self._made()
        events = self._agent.run(question, stream=True, max_steps=self._rules.max_steps)
        answer = ""
        try:
            for event in events:
                if isinstance(event, ActionOutput) and event.is_final_answer:
                    answer = str(event.output)
                if isinstance(event, PlanningStep):
                    self._trace.add(_plan_data(event))
                if not isinstance(event, ActionStep) or event.model_output_message is None:
                    continue
                self._trace.add(self._data(event))
                if event.is_final_answer:
                    return answer, "answered"
                if event.step_number >= self._rules.max_steps:
                    break
        except AgentGenerationError as error:
            raise (error.__cause__ or error) from error
        finally:
            events.close()
        return None, "max_steps"

    def _data(self, step: ActionStep) -> dict[str, Any]:
        usage = step.token_usage
        message = step.model_output_message
        agent = self._agent
        if isinstance(agent, CodeAgent):
            action: Any = step.code_action
            thought = (message.content or "").partition("<code>")[0]
        else:
            calls = (message.raw or {}).get("tool_calls") or []
            action = [call_data(call) for call in calls] or None
            thought = message.content or ""
        return step_data(
            step.step_number,
            thought=thought,
            action=action,
            observation=step.observations or "",
            error=self._error(step),
            tokens=(usage.input_tokens, usage.output_tokens) if usage else (0, 0),
            seconds=(step.timing.end_time or time.time()) - step.timing.start_time,
            final=step.is_final_answer,
        )

    def _error(self, step: ActionStep) -> tuple[str, str] | None:
        """Returns an error's type and message."""
        if isinstance(step.error, AgentParsingError):
            return "parsing", str(step.error)
        agent = self._agent
        if isinstance(agent, CodeAgent):
            outcome = agent.python_executor.outcome
            if step.error is None or outcome is None or outcome.trouble is None:
                return None if step.error is None else (type(step.error).__name__, str(step.error))
            return outcome.trouble, outcome.error
        failed = [text for _, text, ok in agent.results.get(step.step_number, ()) if not ok]
        if not failed:
            return None if step.error is None else (type(step.error).__name__, str(step.error))
        outcome = self._tools.outcome
        names = [c["function"]["name"] for c in step.model_output_message.raw["tool_calls"]]
        of_python = names == [PYTHON] and outcome is not None and outcome.trouble is not None
        return (outcome.trouble if of_python and outcome else "tool") or "tool", failed[-1]


class _Silent(AgentLogger):  # type: ignore[misc]  # a class of a library without types
    """Says nothing, and takes no time for it."""

    def log(self, *args: Any, **options: Any) -> None:
        """Logs nothing."""

    def log_error(self, error_message: str) -> None:
        """Logs nothing."""

    log_code = log_markdown = log_rule = log_task = log_messages = log


_QUIET = _Silent(LogLevel.OFF)


def _plan_data(step: PlanningStep) -> dict[str, Any]:
    usage = step.token_usage
    return step_data(
        0,
        thought=step.plan,
        action=None,
        observation="",
        error=None,
        tokens=(usage.input_tokens, usage.output_tokens) if usage else (0, 0),
        seconds=(step.timing.end_time or time.time()) - step.timing.start_time,
    )
