"""The agent loop: how it ends, what it appends and what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from envserver_tools.calling import Tool, ToolError, function_tool, toolbox
from envserver_tools.loop import LoopEnd, chat_with_tools


class Run:
    """A rollout whose model says what is listed."""

    def __init__(self, *replies: tuple[str, list[str]], cut_off: bool = False) -> None:
        self.max_turns = 20
        self.metrics: dict[str, float] = {}
        self._replies = iter(replies)
        self._reason = "length" if cut_off else "stop"

    async def chat(self, messages: list[Any], tools: list[Any]) -> Any:
        text, names = next(self._replies)
        calls = [{"id": n, "function": {"name": n, "arguments": "{}"}} for n in names]
        return SimpleNamespace(
            content=text,
            tool_calls=calls,
            finish_reason=self._reason,
            message={"role": "assistant", "content": text},
        )

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


async def _fails() -> str:
    raise ToolError("it fails")


TOOLS = toolbox(
    Tool(function_tool("look", "Looks.", {}), lambda: "seen"),
    Tool(function_tool("fail", "Fails.", {}), _fails),
    Tool(function_tool("finish", "Ends.", {}), lambda: "done"),
)


async def _loop(run: Run, **options: Any) -> tuple[LoopEnd, list[Any]]:
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    end = await chat_with_tools(run, messages, TOOLS, final="finish", **options)  # type: ignore[arg-type]
    return end, messages


async def test_the_final_tool_ends_the_loop_and_later_calls_are_not_run() -> None:
    run = Run(("first", ["look"]), ("", ["finish", "fail"]))
    end, messages = await _loop(run)
    assert end == LoopEnd("final_tool", "", "first", "done")
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert run.metrics == {"tool_errors": 0}


async def test_a_text_without_calls_ends_the_loop_unless_there_is_a_reminder() -> None:
    assert (await _loop(Run(("answer", []))))[0].reason == "text"
    reminders = {"hm": "Call a tool.", "answer": None}
    end, messages = await _loop(Run(("hm", []), ("answer", [])), reminder=reminders.get)
    assert end.text == "answer"
    assert messages[2] == {"role": "user", "content": "Call a tool."}


async def test_a_message_that_was_cut_off_runs_no_call() -> None:
    end, messages = await _loop(Run(("half", ["finish"]), cut_off=True))
    assert (end.reason, end.result, len(messages)) == ("cut_off", None, 2)


@pytest.mark.parametrize(("in_a_row", "errors"), [(False, 2), (True, 3)])
async def test_too_many_errors_end_the_loop(in_a_row: bool, errors: int) -> None:
    run = Run(("", ["fail"]), ("", ["look"]), ("", ["fail"]), ("", ["fail"]))
    end, _ = await _loop(run, max_tool_errors=2, errors_in_a_row=in_a_row)
    assert (end.reason, run.metrics["tool_errors"]) == ("limit", errors)


async def test_the_smaller_limit_of_turns_counts() -> None:
    run = Run(*[("", ["look"])] * 5)
    end, messages = await _loop(run, max_turns=2)
    assert (end.reason, len(messages)) == ("limit", 5)


async def test_an_answer_beside_calls_ends_the_loop_after_them() -> None:
    end, messages = await _loop(Run(("42", ["look"])), is_answer=lambda text: text == "42")
    assert (end.reason, messages[-1]["content"]) == ("text", "seen")
