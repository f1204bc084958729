"""The base of all agents' runs, and the baseline agent."""

from __future__ import annotations

import abc
import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

from envserver_tools.calling import Tool, ToolResult
from envserver_tools.visible import visible_text

from envserver import LimitReached, Message, Rollout

from ..interpreter.inside import ANSWER
from ..interpreter.process import Interpreter
from .endpoint import CutOff, Endpoint, Turn
from .prompts import system_prompt
from .rules import AgentOptions, Ending, Solved, ending_of
from .tool_use import Tools, as_function
from .trace import Trace, call_data, step_data

_SAID = re.compile(r"FINAL ANSWER:\s*(.+)")


class AgentRun(abc.ABC):
    """One run. Call `run` in a thread, `stop` from another.

    Args:
        tools: tools besides python and final_answer.
        loop: the event loop in which asynchronous tools run.
        stop_at: `time.time()` at which it ends by itself.
        extra: additional fields of each request to the model.
    """

    def __init__(
        self,
        run: Rollout,
        rules: AgentOptions,
        tools: Sequence[Tool],
        *,
        loop: asyncio.AbstractEventLoop,
        stop_at: float,
        extra: dict[str, Any] | None = None,
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
        """Makes `run` return soon, from whatever it waits for."""
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


def _data(
    number: int, turn: Turn, results: list[ToolResult], began: float, final: bool
) -> dict[str, Any]:
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
