"""The agent: one answer, or a loop of tools; the model's programs run in the rollout's sandbox.
Returns {"code": the argument of `submit` or None, "text": the last text}."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Annotated, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import MAX_RESULT_CHARACTERS, visible_text
from envserver_tools.sandboxed import sandbox_tools
from msgspec import Meta

from envserver import Message, PublicTask, Rollout, Sandbox, tool

from .extraction import MAX_CODE_CHARACTERS, fenced_blocks
from .prompts import REMINDER, ShowTests, question, shown_test, system_prompt
from .running import Verdict
from .scoring import judged

Mode = Literal["single", "tools"]
MAX_TURNS = 10
MAX_TOOL_ERRORS = 10
MAX_ERROR_CHARACTERS = 500
PYTHON_SECONDS = 6

Code = Annotated[str, Meta(max_length=MAX_CODE_CHARACTERS)]


async def solve(task: PublicTask, run: Rollout, mode: Mode, show_tests: ShowTests) -> Json:
    messages: list[Message] = [
        {"role": "system", "content": system_prompt(mode)},
        {"role": "user", "content": question(task.public, mode, show_tests)},
    ]
    if mode == "single":
        reply = await run.chat(messages)
        return {"code": None, "text": reply.content}
    async with run.open_sandbox() as sandbox:
        return await _with_tools(messages, run, Workbench(task, sandbox))


class Workbench:
    def __init__(self, task: PublicTask, sandbox: Sandbox) -> None:
        self.submitted: str | None = None
        self._public = task.public
        self._sandbox = sandbox
        python = sandbox_tools(sandbox, names=["python"], command_seconds=PYTHON_SECONDS)["python"]
        python = dataclasses.replace(python, max_characters=MAX_RESULT_CHARACTERS)
        self.tools = [self.run_tests, python, self.submit]

    @tool
    async def run_tests(self, code: Code) -> str:
        """Runs the visible tests on a program."""
        tests = self._public["tests"]
        if not tests:
            return "There are no visible tests."
        workspace = nullcontext(self._sandbox)
        verdicts, _ = await judged(self._public, code, tests, lambda: workspace)
        lines = [
            f"{shown_test(test)}\n{_outcome_text(verdict)}"
            for test, verdict in zip(tests, verdicts, strict=True)
        ]
        passed = sum(verdict.passed for verdict in verdicts)
        return "\n".join([f"{passed} of {len(tests)} visible tests passed.", *lines])

    @tool
    def submit(self, code: Code) -> str:
        """Hands in the program and ends the task."""
        self.submitted = next(iter(fenced_blocks(code)), code)
        return "Submitted."


async def _with_tools(messages: list[Message], run: Rollout, bench: Workbench) -> Json:
    end = await run.loop(
        messages,
        tools=bench.tools,
        final="submit",
        max_turns=MAX_TURNS,
        max_tool_errors=MAX_TOOL_ERRORS,
        reminder=lambda text: None if _has_block(text) else REMINDER,
    )
    return {"code": bench.submitted, "text": end.text}


def _has_block(text: str) -> bool:
    seen = visible_text(text)
    return seen is not None and any(fenced_blocks(seen))


def _outcome_text(verdict: Verdict) -> str:
    if verdict.passed:
        return "  passed"
    if verdict.error is not None:
        return f"  failed: {verdict.error[:MAX_ERROR_CHARACTERS]}"
    return f"  failed: it gave {verdict.values}"[:MAX_ERROR_CHARACTERS]
