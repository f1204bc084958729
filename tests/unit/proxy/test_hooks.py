"""An environment's hooks look at, change and refuse calls; tokens stay those of the engine.

That stitching stays right whatever hooks do: `test_engine_saw_what_was_sent.py`.
"""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.engine_stand_in import ids_of, prompt_ids
from support.proxy_house import house

from envserver import ServiceError, Services
from envserver.hook_interface import ModelCall
from envserver.proxy.hooks import HookFunctions

SAMPLED = "Hëllo."
NEW = {"role": "assistant", "content": "Nothing to see."}
BODIES: dict[str, dict[str, Any]] = {
    "v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "v1/completions": {"prompt": "hi"},
    "v1/responses": {"input": "hi"},
    "v1/messages": {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]},
}


async def test_the_agent_gets_the_changed_answer_and_the_record_keeps_the_sampled() -> None:
    def change(call: ModelCall) -> None:
        assert call.answer is not None and call.answer["content"] == SAMPLED
        call.change("a guard", answer=NEW)

    async with house(hooks=HookFunctions(None, change)) as made:
        for path, streamed in product(BODIES, (False, True)):
            attempt, _ = made.open()
            body = {"model": "any", **BODIES[path], "stream": streamed}
            async with made.http.post(f"{made.url}/r/{attempt.key}/{path}", json=body) as answer:
                text = await answer.text()
            assert answer.status == 200, path
            assert "Nothing to see." in text, (path, streamed)
            assert SAMPLED not in text and "H\\u00ebllo" not in text
            (call,) = attempt.calls
            assert call.completion_ids.tolist() == ids_of(SAMPLED)
            assert call.message["content"] == "Nothing to see."
            assert call.engine_message["content"] == SAMPLED
            assert "answer_changed" in call.flags and call.delivered == "full"
            assert [(one.at, one.reason, one.changed) for one in call.hooks] == [
                ("answer", "a guard", ["answer"])
            ]


async def test_the_engine_gets_the_changed_request() -> None:
    async def change(call: ModelCall) -> None:
        if call.prompt is not None:
            call.change("another prompt", prompt="changed")
            return
        question = {"role": "user", "content": "changed"}
        call.change("an injected message", messages=[*call.messages, question])

    async with house(hooks=HookFunctions(change, None)) as made:
        for path, body in BODIES.items():
            attempt, _ = made.open()
            status, _ = await made.post(attempt.key, path, {"model": "any", **body})
            assert status == 200, path
            (call,) = attempt.calls
            assert call.messages[-1]["content"] == "changed"
            if path != "v1/completions":
                assert call.prompt_ids.tolist() == prompt_ids(call.messages)
            assert call.exact and "request_changed" in call.flags, path
            assert "answer_changed" not in call.flags


def raises(error: Exception) -> Any:
    def fails(*_: object) -> None:
        raise error

    return fails


CHAT, QUESTION = "v1/chat/completions", BODIES["v1/chat/completions"]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda call: 1 / 0, "hook_error"),
        (lambda call: call.change("why"), "hook_error"),
        (lambda call: call.change("why", answer=NEW), "hook_error"),
        (lambda call: call.change("why", messages=[{"role": "user", "content": 7}]), "hook_error"),
        (raises(ServiceError("The guard's model is away.")), "service_error"),
        (None, "service_error"),  # a state that cannot be made is no bug of a hook
    ],
)
async def test_a_hook_that_fails_is_a_typed_failure(wrong: Any, kind: str) -> None:
    services = Services({}, state=raises(OSError("no database"))) if wrong is None else None
    hooks = HookFunctions(wrong or (lambda call: None), None)
    async with house(hooks=hooks, services=services) as made:
        attempt, _ = made.open()
        status, answer = await made.post(attempt.key, CHAT, QUESTION)
    assert status >= 500 and answer["error"]["code"] == kind
    assert wrong or status == 502
    assert "database" not in answer["error"]["message"]
    assert attempt.service_failure is not None and attempt.service_failure.kind == kind
    assert ("bug" in attempt.service_failure.detail) == (kind == "hook_error")
    assert not attempt.calls


async def test_a_hook_that_waits_ends_with_its_attempt() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(call: ModelCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with house(hooks=HookFunctions(waits, None)) as made:
        attempt, _ = made.open()
        asking = made.asks(attempt.key, CHAT, QUESTION)
        await begun.wait()
        made.proxy.seal(attempt)
        status, _ = await asking
        await ended.wait()
    assert status == 409


ENVIRONMENT = """
from envserver import Environment, LimitReached, Score, Services, Task
from contextlib import nullcontext

class Hooked(Environment):
    def tasks(self, split):
        for n in range(3):
            yield Task(f"t{n}", {"n": n}, {"secret": "xyzzy"})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "xyzzy"}] * 3

    def services(self):
        return nullcontext(Services({}, state=lambda task: {"requests": 0}))

    def on_request(self, call):
        call.caller.state["requests"] += 1
        FAIL
        if call.caller.state["requests"] > 2:
            call.refuse("two are enough")

    async def on_answer(self, call):
        if call.caller.task.hidden["secret"] in call.answer["content"]:
            call.change("kept secret", answer={**call.answer, "content": "***"})

    async def rollout(self, task, run):
        replies = []
        for n in range(3):
            reply = await run.chat([{"role": "user", "content": f"{n}?"}])
            replies.append(reply.content)
            run.log_metric("replies", len(replies))
        return replies

    def score(self, task, result):
        return Score(reward=float(result.limit == "refused" and result.turns == 2))
"""


def test_records_say_what_hooks_did(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text(ENVIRONMENT.replace("FAIL", "pass"))
    words = ("--env", "hooked.py", "--model", "sim", "--env.group_size", 1)
    words += ("--sim.solve_probability", 1)
    ran = envserver("process", *words, "--out", "hooked.jsonl", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "hooked.jsonl")
    assert len(groups) == 3
    for group in groups:
        (rollout,) = group["envserver"]["rollouts"]
        assert rollout["reward"] == 1.0 and rollout["limit"] == "refused"
        assert [(one["at"], one["reason"]) for one in rollout["hooks"]] == [
            ("request", "two are enough"),
            ("answer", "kept secret"),
            ("answer", "kept secret"),
        ]
        assert {"answer_changed", "request_refused"} <= set(rollout["flags"])
        assert group["masks"] == [[-100] * len(tokens) for tokens in group["tokens"]]


@pytest.mark.thorough
def test_a_hook_that_raises_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text(ENVIRONMENT.replace("FAIL", "call.missing"))
    words = ("--env", "hooked.py", "--model", "sim", "--env.group_size", 2)
    ran = envserver("process", *words, "--out", "hooked.jsonl", folder=tmp_path)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()
    told = [line for line in last if "A bug in the environment: its on_request raised" in line]
    assert len(told) == 1 and "hooked.py:" in told[0]
