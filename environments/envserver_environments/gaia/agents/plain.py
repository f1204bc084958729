"""The baseline agent: a loop over native tool calls, without smolagents."""

from __future__ import annotations

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
from .tool_use import Tools
from .trace import Trace, call_data, step_data

_SAID = re.compile(r"FINAL ANSWER:\s*(.+)")


class PlainRun:
    """One run. Call `run` in a thread, `stop` from another. Arguments as in `SmolRun`."""

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
        self._rules = rules
        self._interpreter = Interpreter(
            imports=rules.extra_imports,
            step_seconds=rules.step_seconds,
            stop_at=stop_at,
            characters=rules.observation_characters,
        )
        self._tools = Tools(tools, self._interpreter, rules.observation_characters, loop)
        self._endpoint = Endpoint(
            run,
            tools=self._tools.descriptions,
            token_budget=rules.token_budget,
            stop_at=stop_at,
            extra=extra,
        )
        prompt = system_prompt("plain", tools, rules.extra_imports)
        self._messages: list[Message] = [{"role": "system", "content": prompt}]
        self._trace = Trace(run)

    def run(self, question: str) -> Solved:
        """Runs to the end, whatever it is. Raises EngineError."""
        self._messages.append({"role": "user", "content": question})
        try:
            answer, state = self._loop()
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

    def _loop(self) -> tuple[str | None, Ending]:
        for number in range(1, self._rules.max_steps + 1):
            began = time.time()
            turn = self._endpoint.turn(self._messages)
            self._messages.append(turn.message)
            results = [self._tools.run(call) for call in turn.calls]
            answer = _answer(turn, results)
            self._trace.add(_data(number, turn, results, began, answer is not None))
            if answer is not None:
                return answer, "answered"
            if not turn.calls:
                return None, "no_answer"
            self._messages += [
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
