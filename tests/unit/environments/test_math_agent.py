"""The environment `math`: how its agent talks to the model and ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envserver_environments.math.env import Math

from envserver import Reply, Result
from envserver.workers.run import AttemptRun


def call(name: str, _id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return raw_call(name, json.dumps(arguments), _id)


def raw_call(name: str, arguments: str, _id: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _id, "type": "function", "function": function}],
    }


class ScriptedRun:
    """A `run` whose model says what it is told to, and which keeps what the agent sent."""

    def __init__(self, messages: list[dict[str, Any]], finish_reason: str = "stop") -> None:
        self.messages_left = list(messages)
        self.finish_reason = finish_reason
        self.max_turns = 12
        self.sent: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.calls = 0
        self.metrics: dict[str, float] = {}

    loop = AttemptRun.loop

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> Reply:
        self.calls += 1
        self.sent = list(messages)
        self.tools = tools
        message = self.messages_left.pop(0)
        return Reply(message["content"], message.get("tool_calls", []), self.finish_reason, message)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


async def play(run: ScriptedRun, **settings: Any) -> dict[str, Any]:
    env = Math(Math.Config(**settings))
    task = env.task_from_row({"question": "What is 6 times 7?", "answer": "#### 42"})
    return await env.rollout(task.without_hidden(), run)


async def test_tools_are_offered_run_and_ended_by_finish() -> None:
    run = ScriptedRun(
        [
            call("calculate", expression="6*7"),
            call("finish", answer="42"),
            call("finish", answer="1"),
        ]
    )
    assert (await play(run))["answer"] == "42"
    assert run.calls == 2
    assert run.sent[-1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert [tool["function"]["name"] for tool in run.tools or []] == ["calculate", "finish"]


async def test_a_text_without_a_call_ends_the_rollout() -> None:
    run = ScriptedRun([{"role": "assistant", "content": r"\boxed{42}"}])
    assert await play(run) == {"answer": None, "text": r"\boxed{42}"}


@pytest.mark.parametrize(
    "bad",
    [
        raw_call("calculate", "{"),
        raw_call("calculate", '{"expression": NaN}'),
        raw_call("calculate", '{"expression": "1", "expression": "2"}'),
        raw_call("calculate", '["1"]'),
        raw_call("calculate", '{"expression": 1}'),
        raw_call("calculate", '{"expression": "1", "more": 1}'),
        raw_call("finish", "{}"),
        raw_call("finish", json.dumps({"answer": "1" * 501})),
        raw_call("shell", "{}"),
    ],
)
async def test_broken_calls_are_answered_and_counted(bad: dict[str, Any]) -> None:
    run = ScriptedRun([bad, call("finish", answer="42")])
    assert (await play(run))["answer"] == "42"
    assert run.sent[-1]["content"].startswith("Error: ")
    assert run.metrics["tool_errors"] == 1


async def test_too_many_tool_errors_end_the_rollout() -> None:
    run = ScriptedRun([raw_call("shell", "{}")] * 12)
    assert (await play(run))["answer"] is None
    assert run.calls == 10


async def test_the_turn_limit_ends_the_rollout() -> None:
    run = ScriptedRun([call("calculate", expression="1")] * 12)
    assert (await play(run))["answer"] is None
    assert run.calls == 12


async def test_a_cut_off_answer_is_not_acted_on() -> None:
    run = ScriptedRun([call("finish", answer="42")], finish_reason="length")
    assert (await play(run))["answer"] is None


async def test_single_mode_asks_once_without_tools() -> None:
    run = ScriptedRun([{"role": "assistant", "content": r"\boxed{42}"}])
    assert (await play(run, mode="single"))["text"] == r"\boxed{42}"
    assert run.tools is None and run.calls == 1


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('```bash\npython -c "print(6*7)"\n```', "42"),
        ("```\npython3 -c 'print(6*7)'\n```", "42"),
        ('```bash\npython -c "print(open(1))"\n```', "error: call"),
        ("```bash\nrm -rf /\n```", "Error: "),
        ('```bash\npython -c "import os"\n```', "Error: "),
        ('```bash\npython -c "print(1)"; ls\n```', "Error: "),
        ('```bash\npython -c "print(1)\n```', "Error: "),
        ("```bash\na\n```\n```bash\nb\n```", "Error: "),
        ("```python\nprint(6*7)\n```", "Error: "),
        ("```bash\n" + "a " * 500_000 + "\n```", "Error: the command is too long"),
    ],
)
async def test_seed0_commands_are_calculated_never_run(text: str, output: str) -> None:
    last = {"role": "assistant", "content": r"\boxed{42}"}
    run = ScriptedRun([{"role": "assistant", "content": text}, last])
    assert (await play(run, mode="seed0"))["text"] == r"\boxed{42}"
    assert run.sent[-1]["role"] == "user" and run.sent[-1]["content"].startswith(
        f"Output:\n{output}"
    )


@pytest.mark.parametrize("mode", ["tools", "single", "seed0"])
async def test_demonstrations_solve_every_task(mode: str) -> None:
    env = Math(Math.Config(mode=mode))
    for task in env.tasks("train"):
        run = ScriptedRun(env.demonstration(task) or [])
        output = await env.rollout(task.without_hidden(), run)
        assert env.score(task, Result(output=output)).reward == 1.0, task
        assert not run.messages_left and run.metrics.get("tool_errors", 0) == 0
